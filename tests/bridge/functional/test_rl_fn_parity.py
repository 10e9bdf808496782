"""Every public function of rl_fn: from_jax ≡ through_xla ≡ JAX, value and gradient, over the core's own registry."""

import functools
import os

import jax
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax, through_xla
from tests.bridge.functional.both import assert_same, jax_gradient, to_torch, torch_gradient, weights
from tests.rl_fn.laws import quick_jit, result_and_gradient, split
from tests.rl_fn.registry import CASES

# A random key is no tensor: drawing from one is JAX's affair, and threefry has no rule.
NAMES = [name for name, case in CASES.items() if not case.random]
# through_xla hands the whole function to XLA, whatever its options: in the fast profile one case of each is enough.
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
ONE_EACH = NAMES if THOROUGH else sorted({CASES[name].name: name for name in NAMES}.values())
INTEROP = [pytest.param(from_jax, name, id=f"from_jax-{name}") for name in NAMES]
INTEROP += [pytest.param(through_xla, name, id=f"through_xla-{name}") for name in ONE_EACH]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Compiling is all that through_xla costs here, and optimised code is not what is tested."""
    monkeypatch.setattr(jax, "jit", quick_jit)


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


# No case of these says which arguments have a gradient: masks, weights, metrics and parts of a sum. One case of each.
WITHOUT = sorted({CASES[name].name: name for name in NAMES if not CASES[name].differentiable}.values())


def expected(name):
    """JAX's value and gradient, by the program that the laws have compiled."""
    return result_and_gradient(name, split(*CASES[name].make(0))[0])


@pytest.mark.parametrize(("interop", "name"), INTEROP)
def test_value_and_gradient(interop, name):
    function, arguments, places = bound(name)
    value, gradient = expected(name)
    lowered = interop(function)
    tensors = [jax.tree.map(to_torch, x) for x in arguments]
    assert_same(lowered(*tensors), value)
    active = [tensors[i].requires_grad_() for i in places]
    results = lowered(*tensors)
    assert_same(results, value)
    leaves = [x for x in jax.tree.leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    total = sum(((torch.from_numpy(weights(x)) * x).sum() for x in leaves), start=torch.zeros(()))
    found = torch.autograd.grad(total, active, allow_unused=True) if leaves else [None] * len(active)
    for x, actual, wanted in zip(active, found, gradient, strict=True):
        actual = torch.zeros_like(x) if actual is None else actual
        assert torch.isfinite(actual).all()
        np.testing.assert_allclose(actual.numpy(), np.asarray(wanted), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", WITHOUT)
def test_no_more_gradient_than_in_jax(name):
    """A gradient that JAX stops is zero here too; any other is the same."""
    function, arguments, _ = bound(name)
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]

    def flat(*values):
        return function(*jax.tree.unflatten(tree, values))

    gradient = jax.jit(lambda *arrays: jax_gradient(flat, arrays, places))(*leaves)
    found = torch_gradient(from_jax(flat), leaves, places)
    for actual, wanted in zip(found, gradient, strict=True):
        np.testing.assert_allclose(actual.numpy(), np.asarray(wanted), rtol=2e-5, atol=2e-6)
