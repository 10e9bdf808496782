"""A number that changes from step to step is a zero-dimensional tensor: one program for all values, with a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.functional import from_jax
from tests.bridge.functional.both import to_torch
from tests.rl_fn.hyper_parameters import COUNTS, WITH_NUMBERS, call_of, other_value
from tests.rl_fn.laws import close
from tests.rl_fn.registry import CASES, CONSTRUCTORS


def _counting(function: Any) -> tuple[Any, list[None]]:
    """The function, and a list that grows with every trace of it."""
    traces: list[None] = []

    def counted(**arguments: Any) -> Any:
        traces.append(None)
        return function(**arguments)

    return from_jax(counted), traces


def _leaves(result: Any) -> list[np.ndarray]:
    return [x.detach().float().numpy() for x in jax.tree.leaves(result)]


RANDOM = {case.name for case in CASES.values() if case.random}  # random bits have no rule
NAMES = [name for name in WITH_NUMBERS if name not in CONSTRUCTORS and name not in RANDOM]


@pytest.mark.parametrize("name", NAMES)
def test_two_values_are_one_program(name):
    call, own, others = call_of(name)
    arrays = {p: jax.tree.map(to_torch, x) for p, x in others.items()}
    traced, traces = _counting(call)
    constant = from_jax(call)
    made = []
    for numbers in (own, {p: other_value(name, p, x) for p, x in own.items()}):
        dtypes = {p: torch.int32 if (name, p) in COUNTS else torch.float32 for p in numbers}
        tensors = {p: torch.tensor(x, dtype=dtypes[p]) for p, x in numbers.items()}
        close(_leaves(traced(**arrays, **tensors)), _leaves(constant(**arrays, **numbers)), rtol=1e-4, atol=1e-5)
        made.append(len(traces))
    assert made[0] == made[1]


def test_the_documents_examples_have_gradients():
    """docs/bridge.md: DPO's β and PPO's clip, learned or annealed."""
    rng = np.random.default_rng(0)
    pairs = [rng.normal(size=5).astype(np.float32) for _ in range(4)]
    beta = torch.tensor(0.1, requires_grad=True)
    from_jax(rl_fn.dpo)(*map(torch.from_numpy, pairs), beta=beta).sum().backward()
    expected = jax.grad(lambda b: jnp.sum(rl_fn.dpo(*pairs, beta=b)))(jnp.float32(0.1))
    np.testing.assert_allclose(beta.grad.numpy(), expected, rtol=1e-5)

    new, old, advantages = (rng.normal(size=(2, 3)).astype(np.float32) for _ in range(3))
    clip = torch.tensor(0.1, requires_grad=True)
    tensors = map(torch.from_numpy, (new, old, advantages))
    from_jax(rl_fn.ppo_clip)(*tensors, clip_low=clip, clip_high=clip).sum().backward()
    expected = jax.grad(lambda c: jnp.sum(rl_fn.ppo_clip(new, old, advantages, clip_low=c, clip_high=c)))(
        jnp.float32(0.1)
    )
    assert abs(expected) > 0
    np.testing.assert_allclose(clip.grad.numpy(), expected, rtol=1e-5)
