"""Coefficients that follow a plan instead of a measurement."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from rl_fn._numerics import ANY, AT_LEAST_ONE, NOT_NEGATIVE, Array, Number, known, numbers, require
from rl_fn.control.kl import FLOAT, Controller, Measured, scalar

Count = int | np.integer | Integer[Array, ""]
_COUNT = jnp.dtype(jnp.int32)
KINDS = ("cosine", "linear", "exponential", "warmup_cosine")


class ScheduleState(NamedTuple):
    """State of scheduled_kl: the coefficient in force and the number of updates."""

    coef: Float[Array, ""]
    step: Integer[Array, ""]


def scheduled_kl(kind: str, *, start: Number, end: Number, steps: Count, warmup: Count = 0) -> Controller:
    """Move the coefficient of the KL penalty from one value to another in a fixed number of updates.

    s = t / steps;  cosine: end + (start − end)(1 + cos πs)/2;  linear: start + (end − start)s;
    exponential: start^(1−s) · end^s;  warmup_cosine: start · t / warmup, then the cosine over the rest

    Exactly start at update 0 (warmup_cosine: 0 there, start at update warmup), exactly end from update `steps` on.

    Args:
        kind: "cosine", "linear", "exponential" or "warmup_cosine".
        start: β ≥ 0 that the decay starts from.
        end: β ≥ 0 that it ends at.
        steps: updates until the end, warm-up included.
        warmup: updates of warm-up, for "warmup_cosine" alone.

    Returns:
        Controller; its state is ScheduleState(coef, step). What is measured does not matter.

    Raises:
        ValueError: for an unknown kind, negative values, steps < 1, an exponential from or to 0, a warm-up of another
            kind, or unless 0 < warmup < steps for "warmup_cosine".

    Reference:
        Loshchilov and Hutter (SGDR), arXiv 1608.03983, equation 5, for the cosine; Goyal et al., arXiv 1706.02677,
        section 2.2, for the warm-up.

    >>> controller = scheduled_kl("linear", start=0.4, end=0.0, steps=4)
    >>> state = controller.init()
    >>> for _ in range(2):
    ...     state = controller.update(state, 0.0)
    >>> round(float(state.coef), 4)
    0.2

    """
    require(kind in KINDS, f"kind must be one of {KINDS}, got {kind!r}")
    start, end = numbers(FLOAT, NOT_NEGATIVE, "start and end", start=start, end=end)
    last, first = *numbers(_COUNT, AT_LEAST_ONE, steps=steps), *numbers(_COUNT, ANY, warmup=warmup)
    if kind == "exponential":
        for bound in (start, end):
            require(bound > 0, f"an exponential never meets 0, got {start} to {end}")
    if kind == "warmup_cosine":
        for holds in (first > 0, first < last):
            require(holds, f"need 0 < warmup < steps, got {warmup} of {steps}")
    else:
        require(known(first) and first == 0, f"warmup belongs to 'warmup_cosine', got {warmup} with {kind!r}")
    begin, over = (jnp.asarray(x).astype(jnp.float32) for x in (first, last))

    def value(step: jax.Array) -> jax.Array:
        t = step.astype(jnp.float32)
        s = jnp.clip((t - begin) / (over - begin), 0.0, 1.0)
        weight = 1.0 - s if kind == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * s))
        if kind == "exponential":
            coef = start * jnp.exp(s * (jnp.log(scalar(end)) - jnp.log(scalar(start))))
        else:
            coef = weight * start + (1.0 - weight) * end
        # Selected, so that rounding cannot leave the last value a hair beside the end.
        coef = jnp.where(step >= last, end, coef)
        return jnp.where(step < first, start * (t / jnp.maximum(begin, 1.0)), coef).astype(jnp.float32)

    def init() -> ScheduleState:
        step = jnp.zeros((), jnp.int32)
        return ScheduleState(value(step), step)

    def update(state: ScheduleState, measured: Measured) -> ScheduleState:
        # Counting stops at the end: a run of any length cannot overflow the counter.
        step = jnp.minimum(state.step + 1, last)
        return ScheduleState(value(step), step)

    return Controller(init, update)
