"""A number that changes from step to step is a zero-dimensional tensor: one program for all values, with a gradient."""

import dataclasses
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


@pytest.mark.long
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


OBJECTIVE = rl_fn.recipes.grpo()


def _dpo(a, b, c, d, number):
    return rl_fn.dpo(a[0], b[0], c[0], d[0], beta=number)


def _ppo_clip(a, b, c, d, number):
    return rl_fn.ppo_clip(a, b, c, clip_low=number, clip_high=2 * number)


def _gae(a, b, c, d, number):
    return rl_fn.gae(a, b, d == d, lam=number)


def _kl_coef(a, b, c, d, number):
    batch = rl_fn.Batch(logprobs=-abs(a), old_logprobs=-abs(b), ref_logprobs=-abs(c), advantages=d, mask=d == d)
    return dataclasses.replace(OBJECTIVE, kl=rl_fn.components.KL(coef=number)).parts(batch)[0]


@pytest.mark.parametrize("function", [_dpo, _ppo_clip, _gae, _kl_coef])
def test_a_step_a_value_is_one_program(function):
    """docs/bridge.md: a number that changes from step to step; as a Python number it computes the same."""
    rng = np.random.default_rng(3)
    arrays = [torch.from_numpy(rng.normal(size=(2, 3)).astype(np.float32)) for _ in range(4)]
    traces = []

    def counted(*arguments):
        traces.append(None)
        return function(*arguments)

    step, constant, totals = from_jax(counted), from_jax(function), []
    for value in (0.05, 0.1, 0.25, 0.4):
        traced, fixed = step(*arrays, torch.tensor(value)), constant(*arrays, value)
        for x, y in zip(jax.tree.leaves(traced), jax.tree.leaves(fixed), strict=True):
            np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-6, atol=1e-7)
        totals.append(sum(x.sum().item() for x in jax.tree.leaves(traced)))
    assert len(traces) == 1
    assert len(set(totals)) == len(totals)  # the number is in the result
