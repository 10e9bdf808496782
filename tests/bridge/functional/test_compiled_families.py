"""torch.compile(fullgraph=True) of lowered functions: the same values and gradients as eager, forward and backward."""

import jax
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import rl_fn
from rl_bridge.functional import from_jax
from tests.bridge.functional.both import to_torch, torch_gradient, weights
from tests.rl_fn.registry import CASES

pytestmark = pytest.mark.long

# One of each family, its packed form where it has one, and every form of result: arrays, NamedTuples.
KEYS = [
    "ppo_clip[dual]",
    "gae",
    "gae[packed]",
    "grpo_advantages[group]",
    "kl_k3",
    "aggregate[token-mean]",
    "aggregate_parts[seq-mean-token-mean]",
    "whiten",
    "linear_recurrence",
    "log_ratio[packed]",
    "logits_logprobs[options]",
    "linear_logprobs",
    "mismatch_metrics",
    "top_p",
    "value_clip",
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _call(key, seed):
    """The case's function of its arrays, lowered, and the arrays."""
    args, kwargs = CASES[key].make(seed)
    lowered = from_jax(CASES[key].function)
    static = {k: v for k, v in kwargs.items() if not isinstance(v, np.ndarray | np.generic)}
    names = [k for k in kwargs if k not in static]
    places = [i for i, x in enumerate(args) if isinstance(x, np.ndarray | np.generic)]

    def call(*arrays):
        filled = list(args)
        for place, array in zip(places, arrays, strict=False):
            filled[place] = array
        return lowered(*filled, **static, **dict(zip(names, arrays[len(places) :], strict=True)))

    return call, [args[i] for i in places] + [kwargs[k] for k in names]


@pytest.mark.parametrize("key", KEYS)
def test_compiled_is_eager(key):
    call, arrays = _call(key, 1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    active = [i for i in CASES[key].differentiable if i < len(arrays)]
    for seed in (1, 2):
        arrays = _call(key, seed)[1]
        expected, actual = call(*map(to_torch, arrays)), compiled(*map(to_torch, arrays))
        leaves, tree = jax.tree.flatten(expected)
        assert jax.tree.flatten(actual)[1] == tree
        for a, b in zip(jax.tree.leaves(actual), leaves, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for a, b in zip(torch_gradient(compiled, arrays, active), torch_gradient(call, arrays, active), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2  # with and without gradients


def _batch(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator)
    new = (old + 0.3 * torch.randn(rows, length, generator=generator)).requires_grad_()
    advantages, mask = (
        torch.randn(rows, length, generator=generator),
        torch.rand(rows, length, generator=generator) < 0.8,
    )
    return rl_fn.Batch(new, old, advantages, mask)


def test_keyword_arguments_in_any_order():
    """A bug once: tensors were handed over in the order written, and taken in the order of their names."""
    lowered = from_jax(lambda x, *, b, a: x * a - b)
    compiled = torch.compile(lambda x, y, z: lowered(x, b=y, a=z), fullgraph=True, backend="eager")
    x, y, z = torch.rand(3), torch.rand(3), torch.rand(3)
    torch.testing.assert_close(compiled(x, y, z), x * z - y)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_objective_and_its_gradient(backend):
    parts = from_jax(rl_fn.recipes.dapo().parts)

    def loss(batch):
        total, metrics = parts(batch)
        return total.total / total.denominator, metrics

    batch = _batch(4, 9)
    expected, metrics = loss(batch)
    (gradient,) = torch.autograd.grad(expected, [batch.logprobs])
    actual, compiled_metrics = torch.compile(loss, fullgraph=True, backend=backend)(batch)
    (compiled_gradient,) = torch.autograd.grad(actual, [batch.logprobs])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(compiled_gradient, gradient)
    assert compiled_metrics.keys() == metrics.keys()
    torch.testing.assert_close(compiled_metrics["clip_fraction"], metrics["clip_fraction"])


def test_new_shapes_do_not_recompile_without_end():
    counter = CompileCounterWithBackend("aot_eager")
    lowered = from_jax(rl_fn.kl_k3)
    compiled = torch.compile(lambda x, y: lowered(x, y), fullgraph=True, backend=counter, dynamic=True)
    for rows, length in [(2, 5), (3, 8), (4, 6), (7, 11), (9, 3)]:
        x, y = torch.rand(rows, length), torch.rand(rows, length)
        torch.testing.assert_close(compiled(x, y), lowered(x, y))
    assert counter.frame_count <= 2


def test_many_functions_in_one_process():
    """Dynamo's limit on recompilations is of one function, not of all that from_jax made."""
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    for power in range(torch._dynamo.config.recompile_limit + 2):
        lowered = from_jax(lambda a, b, power=power: a**power + b)
        compiled = torch.compile(lowered, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, y), x**power + y)


def test_gradients_are_uneven():
    """The check sees a gradient that is wrong but sums to the right number."""
    w = weights(torch.zeros(2, 3))
    assert len(np.unique(w)) == 6
