"""Extreme but legal arguments: what a parameter may hold is read off its name, so that a new function cannot escape."""

import inspect
from typing import Any

import numpy as np

from tests.rl_fn.registry import CASES

# A token that one of two policies all but excludes has −10⁴ nats; −inf in logits is an entry cut off.
EXTREMES = {
    "logprob": (0.0, -1e-6, -1.0, -100.0, -1e4),
    "log_ratio": (0.0, 1e-6, 1.0, -1.0, 100.0, -100.0, 1e4, -1e4),
    "signed": (0.0, 1e-3, 1.0, -1.0, 1e4, -1e4),
    "positive": (0.0, 1e-6, 1.0, 1e4),
    "unit": (0.0, 1e-6, 0.5, 1.0),
    "fraction": (1e-6, 0.5, 1.0),
    "logits": (0.0, 1.0, 100.0, -100.0, 1e4, -1e4, -np.inf),
}
# Kept as drawn: parameters and sizes rather than data, and states that a function of ours has made.
GIVEN = {"denominator", "state", "a", "b", "temperature", "t", "p", "penalty", "scale", "delta"}
KIND_OF_NAME = {
    "logprob": {"chosen", "rejected", "ref_chosen", "ref_rejected", "gold"},
    "signed": {"x", "value", "values", "gradient", "inputs", "bootstrap", "objectives", "ideal", "points", "returns"}
    | {"advantages", "rewards", "hidden", "weight", "bias"},
    "positive": {"entropies", "kl", "weights", "margin", "activation_absmax"},
    "unit": {"noise", "decay", "lam", "chosen_win_rate", "rejected_win_rate"},
    "fraction": {"sum_squared_probs"},
}
KIND_OF_SUFFIX = {
    "logprobs": "logprob",
    "log_ratios": "log_ratio",
    "logits": "logits",
    "rewards": "signed",
    "values": "signed",
    "advantages": "signed",
    "lengths": "given",
}


def kind(name: str) -> str | None:
    """Kind of a parameter, None for a name that nothing here knows."""
    if name in GIVEN:
        return "given"
    listed = [k for k, names in KIND_OF_NAME.items() if name in names]
    by_suffix = [k for suffix, k in KIND_OF_SUFFIX.items() if name == suffix or name.endswith("_" + suffix)]
    return (listed or by_suffix or [None])[0]


def named(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, str]:
    """Name of the parameter of every float array of a call, by its place."""
    parameters = list(inspect.signature(CASES[key].function).parameters)
    places = {**dict(enumerate(parameters[: len(args)])), **{k: k for k in kwargs}}
    values = {**dict(enumerate(args)), **kwargs}
    return {p: n for p, n in places.items() if isinstance(values[p], np.ndarray) and values[p].dtype == np.float32}


def extreme(key: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with extremes in all its float arrays: mixed, or one number in the whole array (equal rewards)."""
    args, kwargs = CASES[key].make(seed)
    rng = np.random.default_rng(seed)
    values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    names = named(key, args, kwargs)
    cut: dict[tuple[int, ...], np.ndarray] = {}  # policies that are compared are cut off at the same entries
    for place, name in names.items():
        sort, shape = kind(name), values[place].shape
        if sort is None or sort == "given":
            continue
        choices = np.array(EXTREMES[sort], np.float32)
        if rng.random() < 0.3 and sort != "logits":
            values[place] = np.full(shape, rng.choice(choices), np.float32)
        else:
            values[place] = rng.choice(choices, size=shape).astype(np.float32)
        if sort == "logits":
            kept = cut.setdefault(shape, _kept(values, shape, rng))
            finite = np.where(np.isfinite(values[place]), values[place], 0.0)
            values[place] = np.where(kept, finite, -np.inf).astype(np.float32)
    return tuple(values[i] for i in range(len(args))), {k: values[k] for k in kwargs}


def _kept(values: dict[int | str, Any], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An allowed_tokens with the first entry and the tokens asked for in it."""
    kept = rng.random(shape) < 0.7
    kept[..., 0] = True
    for x in values.values():
        if isinstance(x, np.ndarray) and x.dtype == np.int32 and x.ndim in (len(shape) - 1, len(shape)):
            index = x[..., None] if x.ndim == len(shape) - 1 else x
            if index.shape[:-1] == shape[:-1] and (index < shape[-1]).all():
                np.put_along_axis(kept, index.astype(np.int64), True, axis=-1)
    return kept
