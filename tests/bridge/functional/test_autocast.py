"""torch.autocast changes nothing in a lowered function: JAX says what is computed in which precision."""

import jax
import jax.numpy as jnp
import pytest
import torch

from rl_bridge.functional import from_jax, through_xla
from tests.bridge.functional.sizes_of_cases import NAMES, REGISTRIES, arguments, value_and_gradient
from tests.rl_fn.registry import CASES

# Autocast acts on torch's operations, which a function's cases share.
ONE_EACH = sorted({CASES[name].name: name for name in NAMES}.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_EACH)
def test_the_same_numbers_as_without(name):
    lowered = from_jax(CASES[name].function)
    tensors, filled = arguments(name, REGISTRIES[0])
    expected = value_and_gradient(lowered, filled, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        actual = value_and_gradient(lowered, filled, tensors)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            *(x.float() if x.is_floating_point() else x for x in (a, b)), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("interop", [from_jax, through_xla])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_matmul_and_its_gradient(interop, backward_inside):
    torch.manual_seed(0)
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    lowered = interop(lambda x, y: jnp.sum(jnp.tanh(x @ y), axis=-1))
    expected = torch.autograd.grad(torch.tanh(x @ y).sum(), (x, y))
    with torch.autocast("cpu", torch.bfloat16):
        result = lowered(x, y)
        assert torch.is_autocast_enabled("cpu")
        actual = torch.autograd.grad(result.sum(), (x, y)) if backward_inside else None
    actual = actual or torch.autograd.grad(result.sum(), (x, y))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("backward_inside", [False, True])
def test_under_compile(backward_inside):
    torch.manual_seed(0)
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    lowered = from_jax(lambda x, y: jnp.sum(jnp.tanh(x @ y), axis=-1))
    expected = torch.autograd.grad(torch.tanh(x @ y).sum(), (x, y))
    compiled = torch.compile(lowered, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        result = compiled(x, y)
        actual = torch.autograd.grad(result.sum(), (x, y)) if backward_inside else None
    actual = actual or torch.autograd.grad(result.sum(), (x, y))
    torch.testing.assert_close(result, torch.tanh(x @ y).sum(-1))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
