"""Every public function of rl_fn: from_jax ≡ through_xla ≡ JAX, value and gradient, over the core's own registry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax, through_xla
from tests.bridge.functional.both import assert_same, jax_gradient, to_torch, torch_gradient
from tests.rl_fn.registry import CASES

# A random key is no tensor: drawing from one is JAX's affair, and threefry has no rule.
NAMES = [name for name, case in CASES.items() if not case.random]


def bound(name):
    """The function with its static arguments, and the array arguments in order, positional first."""
    case = CASES[name]
    args, kwargs = case.make(0)
    arrays = {k: v for k, v in kwargs.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in kwargs.items() if k not in arrays}
    function = functools.partial(case.function, **static)

    def positional(*values):
        return function(*values[: len(args)], **dict(zip(arrays, values[len(args) :], strict=True)))

    return positional, [*args, *arrays.values()], case.differentiable


def arrays_to(convert, arguments):
    return [convert(x) if isinstance(x, np.ndarray) else x for x in arguments]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seam", [from_jax, through_xla])
def test_value(seam, name):
    function, arguments, _ = bound(name)
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(arguments)):
        pytest.skip("takes no array")
    expected = function(*jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments))
    actual = seam(function)(*jax.tree.map(to_torch, arguments))
    assert_same(actual, expected)


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].differentiable])
@pytest.mark.parametrize("seam", [from_jax, through_xla])
def test_gradient(seam, name):
    function, arguments, places = bound(name)
    expected = jax_gradient(function, arrays_to(jnp.asarray, arguments), places)
    actual = torch_gradient(seam(function), arguments, places)
    assert all(torch.isfinite(gradient).all() for gradient in actual)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), np.asarray(b), rtol=2e-5, atol=2e-6)
