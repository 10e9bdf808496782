"""Every public function with valid arguments: one table that the laws, the oracle parity and the bridge's parity read.

`CASES["name"]` or `CASES["name[variant]"]`; `case.make(seed)` returns `(args, kwargs)` of NumPy arrays (float32, int32,
bool) and static Python values, with the same shapes for every seed. Array-valued keyword arguments are arrays, the rest
is static.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import rl_fn

B, T, G, V = 3, 7, 4, 11
# Returns an Objective, not arrays: tested in test_objectives.py.
RECIPES = ("dapo", "dr_grpo", "grpo", "ppo", "reinforce_objective", "rloo")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call one public function.

    differentiable: positional arguments with a gradient. mask: position of the mask. masked: positional arguments whose
    values at masked positions must not matter. random: the first argument is a seed for jax.random.key.
    """

    name: str
    make: Callable[[int], Arguments]
    differentiable: tuple[int, ...] = ()
    mask: int | None = None
    masked: tuple[int, ...] = ()
    random: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(rl_fn, self.name)


class Draw:
    """Random valid arguments of fixed shapes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return self.rng.normal(0.0, scale, shape or (B, T)).astype(np.float32)

    def logprobs(self, *shape: int) -> np.ndarray:
        return -self.rng.exponential(1.5, shape or (B, T)).astype(np.float32)

    def positive(self, *shape: int) -> np.ndarray:
        return self.rng.exponential(1.0, shape or (B, T)).astype(np.float32)

    def mask(self, *shape: int) -> np.ndarray:
        """Right-padded rows with holes, as tool outputs make; now and then an empty row."""
        shape = shape or (B, T)
        lengths = self.rng.integers(0, shape[-1] + 1, (*shape[:-1], 1))
        return (np.arange(shape[-1]) < lengths) & (self.rng.random(shape) < 0.8)

    def segments(self) -> np.ndarray:
        """Several sequences in a row: ids rise at random places."""
        return np.cumsum(self.rng.random((B, T)) < 0.3, axis=-1).astype(np.int32)

    def integers(self, high: int, *shape: int, low: int = 0) -> np.ndarray:
        return self.rng.integers(low, high, shape).astype(np.int32)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        return self.rng.uniform(low, high, shape).astype(np.float32)

    def support(self, *shape: int) -> np.ndarray:
        """At least entry 0 stays."""
        kept = self.rng.random(shape) < 0.6
        kept[..., 0] = True
        return kept


CASES: dict[str, Case] = {}


def case(
    key: str,
    build: Callable[[Draw], Arguments],
    *,
    differentiable: tuple[int, ...] = (),
    mask: int | None = None,
    masked: tuple[int, ...] = (),
    random: bool = False,
) -> None:
    CASES[key] = Case(
        key.split("[")[0], lambda seed: build(Draw(seed)), differentiable, mask, masked or differentiable, random
    )


# Recurrence and advantages.
case(
    "linear_recurrence",
    lambda d: ((d.uniform(0.0, 1.0, B, T), d.normal(), d.mask()), {"init": 0.5}),
    differentiable=(0, 1),
    mask=2,
)
case(
    "linear_recurrence[packed]",
    lambda d: ((d.uniform(0.0, 1.0, B), d.normal(), d.mask()), {"segment_ids": d.segments()}),
    differentiable=(1,),
    mask=2,
)
case("discounted_returns", lambda d: ((d.normal(), d.mask()), {"gamma": 0.9}), differentiable=(0,), mask=1)
case(
    "discounted_returns[packed]",
    lambda d: ((d.normal(), d.mask()), {"gamma": 0.9, "segment_ids": d.segments()}),
    differentiable=(0,),
    mask=1,
)
for _name in ("gae", "td_lambda"):
    case(
        _name,
        lambda d: ((d.normal(), d.normal(), d.mask()), {"gamma": 0.97, "lam": 0.9, "bootstrap": 0.3}),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"{_name}[per-row]",
        lambda d: (
            (d.normal(), d.normal(), d.mask()),
            {"gamma": 0.97, "lam": d.uniform(0.0, 1.0, B), "bootstrap": d.normal(B)},
        ),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"{_name}[packed]",
        lambda d: ((d.normal(), d.normal(), d.mask()), {"gamma": 0.97, "lam": 0.9, "segment_ids": d.segments()}),
        differentiable=(0, 1),
        mask=2,
    )
case("length_adaptive_lambda", lambda d: ((d.integers(4000, B, low=1),), {}))
case("length_adaptive_lambda[bounded]", lambda d: ((d.integers(50, B),), {"alpha": 0.1, "minimum": 0.0}))
case("whiten", lambda d: ((d.normal(scale=3.0), d.mask()), {}), differentiable=(0,), mask=1)
case("whiten[keep-mean]", lambda d: ((d.normal(), d.mask()), {"shift_mean": False}), differentiable=(0,), mask=1)

# Groups: `valid` is the mask of a group.
for _scale in ("group", "batch", "none"):
    case(
        f"grpo_advantages[{_scale}]",
        lambda d, scale=_scale: ((d.normal(B, G), d.mask(B, G)), {"scale": scale}),
        differentiable=(0,),
        mask=1,
    )
case("grpo_advantages", lambda d: ((d.normal(B, G),), {}), differentiable=(0,))
case("rloo_advantages", lambda d: ((d.normal(B, G),), {}), differentiable=(0,))
case("rloo_advantages[valid]", lambda d: ((d.normal(B, G), d.mask(B, G)), {}), differentiable=(0,), mask=1)

# Importance.
for _level in ("token", "sequence", "sequence_sum"):
    case(
        f"log_ratio[{_level}]",
        lambda d, level=_level: ((d.logprobs(), d.logprobs(), d.mask()), {"level": level}),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"truncated_importance_weights[{_level}]",
        lambda d, level=_level: ((d.normal(), d.mask()), {"cap": 1.5, "level": level}),
        mask=1,
        masked=(0,),
    )
    case(
        f"masked_importance_weights[{_level}]",
        lambda d, level=_level: ((d.normal(), d.mask()), {"low": 0.4, "high": 3.0, "level": level}),
        mask=1,
        masked=(0,),
    )
case(
    "log_ratio[packed]",
    lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {"level": "sequence", "segment_ids": d.segments()}),
    differentiable=(0, 1),
    mask=2,
)
case("effective_sample_size", lambda d: ((d.positive(), d.mask()), {}), mask=1, masked=(0,))
case("mismatch_metrics", lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {}), mask=2, masked=(0, 1))
case(
    "mismatch_metrics[packed]",
    lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {"segment_ids": d.segments()}),
    mask=2,
    masked=(0, 1),
)

# Divergences.
for _name in ("kl_k1", "kl_k2", "kl_k3", "kl_abs"):
    case(_name, lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {}), differentiable=(0, 1), mask=2)
case("kl_k3[close]", lambda d: ((x := d.logprobs(), x + d.normal(scale=1e-2), d.mask()), {}), mask=2, masked=(0, 1))
case("kl_straight_through", lambda d: ((d.normal(), d.normal()), {}))
case("kl_categorical", lambda d: ((d.normal(B, V), d.normal(B, V)), {}), differentiable=(0, 1))
case("entropy", lambda d: ((d.normal(B, V),), {}), differentiable=(0,))

# Losses.
case("reinforce", lambda d: ((d.logprobs(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
for _name in ("ppo_clip", "clipped_tokens"):
    _gradient = (0,) if _name == "ppo_clip" else ()
    case(
        _name,
        lambda d: ((d.logprobs(), d.logprobs(), d.normal(), d.mask()), {}),
        differentiable=_gradient,
        mask=3,
        masked=(0, 1, 2),
    )
    case(
        f"{_name}[dual]",
        lambda d: (
            (d.logprobs(), d.logprobs(), d.normal(), d.mask()),
            {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
        ),
        differentiable=_gradient,
        mask=3,
        masked=(0, 1, 2),
    )
case("entropy_bonus", lambda d: ((d.positive(), d.mask()), {}), differentiable=(0,), mask=1)
case("value_loss", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
case("value_huber", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
case(
    "value_clip",
    lambda d: ((d.normal(), d.normal(), d.normal(), d.mask()), {"clip": 0.2}),
    differentiable=(0,),
    mask=3,
    masked=(0, 1, 2),
)

# Aggregation.
for _mode in (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
):
    _horizon = {"horizon": 16} if _mode == "seq-mean-token-sum-norm" else {}
    _shape = (2, B, T) if _mode == "prompt-mean" else (B, T)
    for _name in ("aggregate_parts", "aggregate"):
        case(
            f"{_name}[{_mode}]",
            lambda d, mode=_mode, extra=_horizon, shape=_shape: ((d.normal(*shape), d.mask(*shape), mode), dict(extra)),
            differentiable=(0,),
            mask=1,
        )
    if _mode != "prompt-mean":
        case(
            f"aggregate[{_mode}, packed]",
            lambda d, mode=_mode, extra=_horizon: (
                (d.normal(), d.mask(), mode),
                {"segment_ids": d.segments(), **extra},
            ),
            differentiable=(0,),
            mask=1,
        )
case(
    "aggregate[denominator]",
    lambda d: ((d.normal(), d.mask(), "token-mean"), {"denominator": np.array(40.0, np.float32)}),
    differentiable=(0,),
    mask=1,
)
for _name in ("masked_sum", "masked_mean", "masked_var"):
    case(_name, lambda d: ((d.normal(), d.mask()), {}), differentiable=(0,), mask=1)
    case(f"{_name}[axis]", lambda d: ((d.normal(), d.mask()), {"axis": -1}), differentiable=(0,), mask=1)

# Log-probabilities.
case("logits_logprobs", lambda d: ((d.normal(B, T, V, scale=3.0), d.integers(V, B, T)), {}), differentiable=(0,))
case(
    "logits_logprobs[options]",
    lambda d: (
        (d.normal(B, T, V, scale=3.0), d.integers(V, B, T)),
        {"temperature": d.uniform(0.5, 2.0, B, T), "softcap": 5.0, "support": np.arange(V) != V},
    ),
    differentiable=(0,),
)
case(
    "logits_logprobs[support]",
    lambda d: ((d.normal(B, V, scale=3.0), np.zeros(B, np.int32)), {"temperature": 0.7, "support": d.support(B, V)}),
    differentiable=(0,),
)
# The maximum is held constant in the derivative, so only finish(merge(...)) has a gradient: see test_logprobs.py.
case("row_state", lambda d: ((d.normal(B, V, scale=3.0), d.integers(V, B)), {"temperature": 0.7}))
case("row_state[tile]", lambda d: ((d.normal(B, V), d.integers(3 * V, B)), {"start": V}))


def _states(d: Draw, parts: int) -> list[rl_fn.RowState]:
    """States of tiles, made with NumPy so that the case depends on nothing it tests."""
    tiles = d.normal(parts, B, V, scale=3.0).astype(np.float64)
    maximum = tiles.max(axis=-1)
    shifted = tiles - maximum[..., None]
    fields = (maximum, np.exp(shifted).sum(axis=-1), (shifted * np.exp(shifted)).sum(axis=-1))
    owner = np.arange(parts)[:, None] == 0
    target = np.where(owner, tiles[..., 0], -np.inf)
    columns = [x.astype(np.float32) for x in (*fields, target)]
    return [rl_fn.RowState(*(x[i] for x in columns)) for i in range(parts)]


case("merge", lambda d: (tuple(_states(d, 2)), {}))
case("finish", lambda d: (tuple(_states(d, 1)), {}))
case(
    "linear_logprobs",
    lambda d: ((d.normal(B, T, 5), d.normal(V, 5), d.integers(V, B, T)), {"chunk": 4}),
    differentiable=(0, 1),
)
case(
    "linear_logprobs[options]",
    lambda d: (
        (d.normal(B, 5), d.normal(V, 5), np.zeros(B, np.int32)),
        {
            "bias": d.normal(V),
            "temperature": d.uniform(0.5, 2.0, B),
            "softcap": 5.0,
            "support": d.support(V),
            "chunk": 4096,
        },
    ),
    differentiable=(0, 1),
)
case("sequence_logprobs", lambda d: ((d.logprobs(), d.mask()), {}), differentiable=(0,), mask=1)
case(
    "sequence_logprobs[packed]",
    lambda d: ((d.logprobs(), d.mask()), {"segment_ids": d.segments()}),
    differentiable=(0,),
    mask=1,
)

# Sampling.
case("temperature", lambda d: ((d.normal(B, V), 0.7), {}), differentiable=(0,))
case("temperature[per-row]", lambda d: ((d.normal(B, V), np.array([0.0, 0.5, 2.0], np.float32)), {}))
case("top_k", lambda d: ((d.normal(B, V), 4), {}))
case("top_k[per-row]", lambda d: ((d.normal(B, V), np.array([1, 4, 99], np.int32)), {}))
case("top_p", lambda d: ((d.normal(B, V, scale=2.0), 0.8), {}))
case("top_p[per-row]", lambda d: ((d.normal(B, V), np.array([0.1, 0.8, 1.0], np.float32)), {}))
case("min_p", lambda d: ((d.normal(B, V, scale=2.0), 0.1), {}))
case("min_p[per-row]", lambda d: ((d.normal(B, V), np.array([0.0, 0.2, 1.0], np.float32)), {}))
case("repetition_penalty", lambda d: ((d.normal(B, V), d.support(B, V), 1.3), {}), differentiable=(0,))
case(
    "repetition_penalty[per-row]",
    lambda d: ((d.normal(B, V), d.support(B, V), np.array([0.8, 1.0, 2.0], np.float32)), {}),
)
case(
    "sample",
    lambda d: ((int(d.rng.integers(2**31)), d.normal(B, V, scale=2.0)), {"top_k": 6, "top_p": 0.9, "min_p": 0.05}),
    random=True,
)
