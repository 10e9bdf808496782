"""One comparison: a library's own function, our version of it, and what rl_fn gives without the dialect."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import rl_fn

PROMPTS, GROUP, TOKENS = 4, 3, 10
ROWS = PROMPTS * GROUP
Numbers = tuple[np.ndarray, np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Example:
    """Random float32 arrays, `ROWS × TOKENS`: ragged answers, one with a hole, and one without a token if asked for."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray

    @classmethod
    def random(cls, seed: int, *, empty_row: bool = False, hole: bool = False, spread: float = 0.4) -> "Example":
        """Old, rollout and reference log-probabilities lie about `spread` nats from the policy's."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, TOKENS + 1, ROWS)
        lengths[0] = 0 if empty_row else TOKENS
        mask = np.arange(TOKENS)[None, :] < lengths[:, None]
        mask[1] = True
        mask[1, 3:5] = not hole
        new = -rng.gamma(2.0, 0.7, (ROWS, TOKENS)) - 0.05
        old, rollout, ref = (np.minimum(new + rng.normal(0, spread, new.shape), -1e-3) for _ in range(3))
        entropies = rng.gamma(2.0, 0.5, new.shape)
        advantages, values = rng.normal(size=new.shape), rng.normal(size=new.shape)
        rewards = rng.normal(size=(PROMPTS, GROUP)).round(2)
        new, old, rollout, ref = (x.astype(np.float32) for x in (new, old, rollout, ref))
        entropies, advantages, values = (x.astype(np.float32) for x in (entropies, advantages, values))
        return cls(new, old, rollout, ref, entropies, advantages, values, mask, rewards.astype(np.float32))

    def batch(self, **arrays: Any) -> rl_fn.Batch:
        """A Batch of everything, for objectives."""
        fields = {name: jnp.asarray(getattr(self, name)) for name in rl_fn.Batch._fields if hasattr(self, name)}
        return rl_fn.Batch(**{**fields, **arrays})

    def torch(self) -> dict[str, torch.Tensor]:
        """Every array as a tensor; the mask as numbers, as trainers have it, and logprobs with a gradient."""
        tensors = {f.name: torch.from_numpy(np.array(getattr(self, f.name))) for f in dataclasses.fields(self)}
        tensors["mask"] = tensors["mask"].float()
        tensors["logprobs"].requires_grad_()
        return tensors

    def grouped(self, name: str) -> jax.Array:
        """An array as `PROMPTS × GROUP × TOKENS`."""
        return jnp.asarray(getattr(self, name)).reshape(PROMPTS, GROUP, TOKENS)

    def token_rewards(self) -> np.ndarray:
        """Each answer's reward on its last counted token."""
        out = np.zeros((ROWS, TOKENS), np.float32)
        for row, reward in enumerate(self.rewards.reshape(-1)):
            counted = np.flatnonzero(self.mask[row])
            if len(counted):
                out[row, counted[-1]] = reward
        return out


@dataclasses.dataclass(frozen=True)
class Case:
    """`peer` and `ours` give a value and, if there is one, its gradient; `default` is rl_fn without the dialect."""

    name: str
    peer: Callable[[Example], Numbers]
    ours: Callable[[Example], Numbers]
    default: Callable[[Example], Numbers] | None = None
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-5
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Largest absolute differences over the examples; `agrees` to the tolerance, relative to max(1, |peer|)."""

    library: str
    name: str
    value: float
    gradient: float | None
    default: float | None
    agrees: bool
    note: str


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Largest |a − b|, and the same relative to max(1, |b|); infinite where only one is finite or shapes differ."""
    if a.shape != b.shape:
        return float("inf"), float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, 0.0, np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)))
    gap = np.where(np.isnan(gap), np.inf, gap)
    return float(gap.max(initial=0.0)), float((gap / np.maximum(1.0, np.nan_to_num(np.abs(b), nan=1.0))).max(initial=0))


def compare(library: str, case: Case, seeds: int = 3) -> Row:
    """Run a case on a few random examples."""
    value = gradient = default = relative = 0.0
    has_gradient = False
    for seed in range(seeds):
        example = Example.random(seed, **case.example)
        peer, ours = case.peer(example), case.ours(example)
        gap, scaled = difference(ours[0], peer[0])
        value, relative = max(value, gap), max(relative, scaled)
        if peer[1] is not None and ours[1] is not None:
            has_gradient = True
            gap, scaled = difference(ours[1], peer[1])
            gradient, relative = max(gradient, gap), max(relative, scaled)
        if case.default is not None:
            plain = case.default(example)
            default = max(default, difference(plain[0], peer[0])[0])
            if plain[1] is not None and peer[1] is not None:
                default = max(default, difference(plain[1], peer[1])[0])
    return Row(
        library,
        case.name,
        value,
        gradient if has_gradient else None,
        default if case.default is not None else None,
        relative <= case.tolerance,
        case.note,
    )


def torch_numbers(loss: torch.Tensor, logprobs: torch.Tensor) -> Numbers:
    """A torch loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach().numpy(), gradient.numpy()


def jax_numbers(function: Callable[[jax.Array], jax.Array], x: np.ndarray) -> Numbers:
    """The value of a function and its gradient."""
    value, gradient = jax.value_and_grad(function)(jnp.asarray(x))
    return np.asarray(value), np.asarray(gradient)


def objective(built: rl_fn.Objective) -> Callable[[Example], Numbers]:
    """Loss and gradient of an objective."""

    def run(example: Example) -> Numbers:
        return jax_numbers(lambda x: built(example.batch(logprobs=x))[0], example.logprobs)

    return run
