"""from_jax under torch.compile(fullgraph=True): the eager values and gradients, and few recompilations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import rl_fn
from rl_bridge.functional import from_jax
from tests.bridge.functional.both import to_torch
from tests.rl_fn.registry import CASES

NAMES = ["ppo_clip", "gae", "grpo_advantages", "kl_k3", "whiten", "linear_recurrence"]


def arguments(name):
    args, kwargs = CASES[name].make(0)
    tensors = [to_torch(x).requires_grad_(i in CASES[name].differentiable) for i, x in enumerate(args)]
    return tensors, {k: to_torch(v) for k, v in kwargs.items()}


def value_and_gradient(fn, args, kwargs):
    leaves = [x for x in jax.tree.leaves(fn(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    active = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    total = sum((x * torch.arange(1.0, x.numel() + 1).reshape(x.shape)).sum() for x in leaves if x.requires_grad)
    return leaves, list(torch.autograd.grad(total, active)) if active else []


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_compiled_equals_eager(name, backend):
    args, kwargs = arguments(name)
    function = from_jax(CASES[name].function)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected, actual = value_and_gradient(function, args, kwargs), value_and_gradient(compiled, args, kwargs)
    assert len(expected[1]) == len([x for x in args if isinstance(x, torch.Tensor) and x.requires_grad])
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name):
    assert_compiled_equals_eager(name, "aot_eager")


@pytest.mark.slow  # a C++ compiler runs for each
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["ppo_clip", "gae"])
def test_inductor_equals_eager(name):
    assert_compiled_equals_eager(name, "inductor")


def test_new_shapes_do_not_recompile_without_bound():
    counter = CompileCounterWithBackend("aot_eager")
    fn = from_jax(functools.partial(rl_fn.ppo_clip, clip_low=0.2, clip_high=0.2))
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=counter)
    for rows, columns in [(2, 5), (3, 7), (4, 9), (6, 11), (7, 13)]:
        generator = np.random.default_rng(columns)
        logprobs, old, advantages = (
            torch.from_numpy(generator.normal(1.0, 0.3, (rows, columns)).astype(np.float32)) for _ in range(3)
        )
        for a, b in zip(
            jax.tree.leaves(compiled(logprobs, old, advantages)),
            jax.tree.leaves(fn(logprobs, old, advantages)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
def test_objective_in_one_graph(packed):
    rng = np.random.default_rng(0)
    rewards, values = (torch.from_numpy(rng.normal(size=(2, 6)).astype(np.float32)) for _ in range(2))
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.int32)

    def loss(logprobs, old, advantages, mask, segments):
        advantages = rl_fn.whiten(advantages, mask)
        tokens = rl_fn.ppo_clip(logprobs, old, advantages, mask, clip_high=0.28)
        tokens = tokens + 0.1 * rl_fn.kl_k3(logprobs, old)
        if segments is not None:
            tokens = tokens * (1.0 + segments.astype(jnp.float32))
        return rl_fn.aggregate(tokens, mask, "token-mean")

    eager = from_jax(loss)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    x = rewards.clone().requires_grad_()
    args = (x, values, rewards * 2.0, segments < 1, segments if packed else None)
    (expected,), (actual,) = (torch.autograd.grad(f(*args), x) for f in (eager, compiled))
    assert expected.any()
    torch.testing.assert_close(compiled(*args), eager(*args))
    torch.testing.assert_close(actual, expected)


def test_a_changed_static_argument_is_not_baked_in():
    fn = from_jax(lambda x, scale, mode: x * scale if mode == "up" else x / scale)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    x = torch.arange(6.0).reshape(2, 3)
    for mode, scale in [("up", 2.0), ("down", 2.0), ("up", 4.0)]:
        torch.testing.assert_close(compiled(x, torch.tensor(scale), mode), fn(x, torch.tensor(scale), mode))


def test_a_number_that_changes_is_an_error_not_a_stale_value():
    compiled = torch.compile(from_jax(lambda x, scale: x * scale), fullgraph=True, backend="aot_eager")
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x, 2.0), 2.0 * x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_intern"):
        compiled(x, 3.0)
