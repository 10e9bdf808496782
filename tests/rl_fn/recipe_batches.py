"""Rollouts and batches that any recipe can read, with every optional field, and one compiled function of them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import RECIPES, Draw

# Columns beyond WIDTH are padding in every row.
WIDTH, COLUMNS, REWARDS, STEPS = 6, 8, 2, 3
TIS = rl_fn.components.TIS(2.0)


def with_everything(name: str) -> rl_fn.Objective:
    """The recipe with a KL and an entropy term and, where it takes one, a correction."""
    objective = getattr(rl_fn.recipes, name)()
    own = objective.correction
    correction = None if objective.loss.weighs_rollout else TIS if own is None else rl_fn.components.Product((own, TIS))
    return objective.replace(
        kl=rl_fn.components.KL("k3", 0.1), entropy=rl_fn.components.EntropyBonus(0.01), correction=correction
    )


OBJECTIVES = {name: with_everything(name) for name in RECIPES}


def shape_of(objective: rl_fn.Objective) -> str:
    return objective.advantage.rewards_shape


def _near(d: Draw, logprobs: np.ndarray, scale: float) -> np.ndarray:
    """Log-probabilities of another policy: never above 0."""
    return np.minimum(logprobs + d.normal(*logprobs.shape, scale=scale), -0.01).astype(np.float32)


def rollouts(
    objective: rl_fn.Objective, seed: int, *, prompts: int = 2, group: int = 4, equal: bool = False
) -> rl_fn.Rollouts:
    """Every field that an estimator reads, a critic's values too."""
    d = Draw(seed)
    shape = shape_of(objective)
    answers = (prompts, group, STEPS) if shape == "*batch G S" else (prompts, group)
    rewards = {"*batch R G": (prompts, REWARDS, group)}.get(shape, answers)
    tokens = (*answers, COLUMNS)
    mask = d.mask(*tokens)
    mask[..., WIDTH:] = False
    logprobs = d.logprobs(*tokens)
    near = [_near(d, logprobs, 0.3) for _ in range(3)]
    drawn = np.ones(rewards, np.float32) if equal else d.integers(3, *rewards).astype(np.float32)
    return rl_fn.Rollouts(
        drawn,
        mask,
        old_logprobs=near[0],
        ref_logprobs=near[1],
        teacher_logprobs=near[2],
        greedy_rewards=np.ones(prompts, np.float32) if equal else d.normal(prompts),
        state_ids=d.integers(2, prompts, group, STEPS),
        values=d.normal(*tokens),
    )


@functools.partial(quick_jit, static_argnums=0)
def advantages(objective: rl_fn.Objective, read: rl_fn.Rollouts) -> jax.Array:
    return objective.advantages(read).advantages


def batch(objective: rl_fn.Objective, seed: int, **options: Any) -> rl_fn.Batch:
    """Rows of COLUMNS tokens with advantages from the objective's estimator, all optional fields but segment_ids."""
    read = rollouts(objective, seed, **options)
    got = np.asarray(advantages(objective, read))
    assert got.shape == read.mask.shape and not got[~read.mask].any() and np.isfinite(got).all()
    d = Draw(seed + 1000)
    flat = (-1, COLUMNS)
    mask, old = read.mask.reshape(flat), read.old_logprobs.reshape(flat)
    rows = mask.shape
    logprobs = _near(d, old, 0.3)
    return rl_fn.Batch(
        logprobs,
        old,
        got.reshape(flat),
        mask,
        _near(d, old, 0.2),
        read.ref_logprobs.reshape(flat),
        d.positive(*rows),
        correct=np.broadcast_to(d.integers(2, rows[0], 1) > 0, rows).copy(),
        noise=d.uniform(0.0, 1.0, *rows),
    )


class Outcome(NamedTuple):
    loss: rl_fn.Ratio
    metrics: dict[str, rl_fn.Ratio]
    gradient: dict[str, jax.Array]

    @property
    def value(self) -> float:
        return float(self.loss.value())


FLOATS = ("logprobs", "entropies", "old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "noise")


def loss_alone(objective: rl_fn.Objective) -> rl_fn.Objective:
    """Without what only the advantages depend on: recipes with the same loss are compiled once."""
    return dataclasses.replace(
        objective,
        name="loss",
        advantage=rl_fn.components.RawReward(),
        reward_kl=None,
        value=None,
        dynamic_sampling=None,
    )


def run(objective: rl_fn.Objective, of: rl_fn.Batch) -> Outcome:
    """Undivided loss and metrics, and the gradient of the total in every floating field."""
    return _run(loss_alone(objective), of)


@functools.partial(quick_jit, static_argnums=0)
def _run(objective: rl_fn.Objective, of: rl_fn.Batch) -> Outcome:

    def total(fields):
        loss, metrics = objective.parts(of._replace(**fields))
        return loss.total, (loss, metrics)

    fields = {name: jnp.asarray(getattr(of, name)) for name in FLOATS}
    gradient, (loss, metrics) = jax.grad(total, has_aux=True)(fields)
    return Outcome(loss, metrics, gradient)


def mapped(function: Any, of: rl_fn.Batch) -> rl_fn.Batch:
    return rl_fn.Batch(*(x if x is None else function(x) for x in of))


def close(a: Outcome, b: Outcome, back: Any = lambda x: x) -> None:
    """The same loss, metrics and gradient; `back` undoes on a gradient what was done to the batch."""
    for x, y in zip(jax.tree.leaves((a.loss, a.metrics)), jax.tree.leaves((b.loss, b.metrics)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    for name in FLOATS:
        np.testing.assert_allclose(a.gradient[name], back(b.gradient[name]), rtol=2e-5, atol=1e-6, err_msg=name)
