"""What a case is, random arguments for it, and the table that every family of cases adds itself to.

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

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call one public function.

    differentiable: positional arguments with a gradient. mask: position of the mask. masked: positional arguments whose
    values at masked positions must not matter. random: the first argument is a seed for jax.random.key. family: the
    file in this folder that has the function's first case.

    surrogate: None if the gradient is the slope of the value; for a function that stops a gradient somewhere, the
    function whose slope the gradient is, `surrogate(moving, held, **kwargs)` of all positional arguments twice, the
    second time as they stand inside sg[·] (tests/oracle/surrogates.py).
    """

    name: str
    make: Callable[[int], Arguments]
    differentiable: tuple[int, ...] = ()
    mask: int | None = None
    masked: tuple[int, ...] = ()
    random: bool = False
    family: str = ""
    surrogate: Callable[..., Any] | None = None

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

    def allowed_tokens(self, *shape: int) -> np.ndarray:
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
    surrogate: Callable[..., Any] | None = None,
) -> None:
    name, module = key.split("[")[0], build.__module__.split(".")[-1]
    CASES[key] = Case(
        name,
        lambda seed: build(Draw(seed)),
        differentiable,
        mask,
        masked or differentiable,
        random,
        next((known.family for known in CASES.values() if known.name == name), module),
        surrogate,
    )
