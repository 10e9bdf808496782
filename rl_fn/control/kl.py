"""Controllers of a penalty's coefficient: init/update pairs whose state is a pytree, updated once a training step.

`state.coef` is the coefficient in force; `update(state, measured)` returns the state for the next step. A NaN
measurement (a step with nothing to measure) leaves the state as it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from rl_fn._numerics import ANY, NOT_NEGATIVE, POSITIVE, Array, Constant, Number, Range, numbers, require

Measured = Number | Float[Array, ""]


class Controller(NamedTuple):
    """A pair of pure functions: `init() → state` and `update(state, measured) → state`; `state.coef` is the output."""

    init: Callable[[], Any]
    update: Callable[[Any, Measured], Any]


class CoefState(NamedTuple):
    """State of a controller that remembers its coefficient alone."""

    coef: Float[Array, ""]


class PIDState(NamedTuple):
    """State of pid_kl: the coefficient, its integral term ki·Σe, the last error and the number of updates."""

    coef: Float[Array, ""]
    integral: Float[Array, ""]
    error: Float[Array, ""]
    step: Integer[Array, ""]


def scalar(x: Number | Array) -> jax.Array:
    """Return a float32 scalar: the state keeps one dtype whatever is measured."""
    require(np.shape(x) == (), f"measured must be one number, got shape {np.shape(x)}")
    return jnp.asarray(x).astype(jnp.float32)


def unless_nan(measured: jax.Array, new: Any, old: Any) -> Any:
    """Return the old state where the measurement is NaN, else the new one."""
    return jax.tree.map(lambda a, b: jnp.where(jnp.isnan(measured), b, a), new, old)


_SHARE = Range("must be in (0, 1]", lambda x: 0 < x <= 1)
FLOAT = jnp.dtype(jnp.float32)


def interval(floor: Range, coef: Number, low: Number, high: Number) -> tuple[Constant, Constant, Constant]:
    """Check low ≤ coef ≤ high, and low against its own range."""
    (low,) = numbers(FLOAT, floor, low=low)
    coef, high = numbers(FLOAT, ANY, coef=coef, high=high)
    refused = f"need low ≤ coef ≤ high, got low={low}, coef={coef}, high={high}"
    require(low <= coef, refused)
    require(coef <= high, refused)
    return coef, low, high


def fixed_kl(coef: Number) -> Controller:
    """Keep the coefficient of the KL penalty constant.

    βₜ₊₁ = βₜ

    Args:
        coef: β ≥ 0.

    Returns:
        Controller; its state is CoefState(coef).

    Raises:
        ValueError: for a negative coefficient.

    Reference:
        Ouyang et al. (InstructGPT), arXiv 2203.02155, equation 2.

    >>> controller = fixed_kl(0.5)
    >>> float(controller.update(controller.init(), 9.0).coef)
    0.5

    """
    (coef,) = numbers(FLOAT, NOT_NEGATIVE, coef=coef)
    return Controller(lambda: CoefState(scalar(coef)), lambda state, measured: state)


def exponential_kl(
    target: Number,
    coef: Number = 0.2,
    *,
    up: Number = 1.03,
    down: Number = 0.99,
    low: Number = 1e-6,
    high: Number = float("inf"),
) -> Controller:
    """Multiply the coefficient by one of two factors: up when the KL is over its target, down when it is under it.

    βₜ₊₁ = clip(βₜ · (up if KL > target, down if KL < target), low, high)

    It never rests: around the target it moves between the two factors, further up at once than down.

    Args:
        target: KL to hold, in the units that are measured (nats a token, or a sequence), > 0.
        coef: β at the start.
        up: factor ≥ 1 for too much KL.
        down: factor in (0, 1] for too little.
        low: smallest β, > 0: from 0 no factor leads back.
        high: largest β.

    Returns:
        Controller; its state is CoefState(coef).

    Raises:
        ValueError: unless target > 0, 0 < down ≤ 1 ≤ up and 0 < low ≤ coef ≤ high.

    Reference:
        Schulman et al. (PPO), arXiv 1707.06347, section 4, adapts its KL penalty by fixed factors in the same way.

    >>> controller = exponential_kl(0.1, coef=1.0)
    >>> round(float(controller.update(controller.init(), 0.2).coef), 4)
    1.03

    """
    (target,) = numbers(FLOAT, POSITIVE, target=target)
    down, up = numbers(FLOAT, ANY, down=down, up=up)
    refused = f"need 0 < down ≤ 1 ≤ up, got down={down}, up={up}"
    for holds in (down > 0, down <= 1, up >= 1):
        require(holds, refused)
    coef, low, high = interval(POSITIVE, coef, low, high)

    def update(state: CoefState, measured: Measured) -> CoefState:
        kl = scalar(measured)
        factor = jnp.where(kl > target, up, jnp.where(kl < target, down, 1.0))
        return CoefState(jnp.clip(state.coef * factor, low, high))

    return Controller(lambda: CoefState(scalar(coef)), update)


def linear_kl(
    target: Number,
    coef: Number = 0.2,
    *,
    horizon: Number = 10_000,
    samples: Number = 1,
    clip: Number = 0.2,
    low: Number = 0.0,
    high: Number = float("inf"),
) -> Controller:
    """Ziegler's controller: the coefficient changes in proportion to the clipped relative error of the KL.

    e = clip(KL / target − 1, −c, c);  βₜ₊₁ = clip(βₜ · (1 + e · samples / horizon), low, high)

    Args:
        target: KL to hold, in the units that are measured, > 0.
        coef: β at the start.
        horizon: H, in samples: a clipped error of c changes β by the factor 1 ± c in that many samples.
        samples: how many samples one update stands for (the batch of sequences).
        clip: c in (0, 1].
        low: smallest β.
        high: largest β.

    Returns:
        Controller; its state is CoefState(coef).

    Raises:
        ValueError: unless target, horizon and samples are positive, clip · samples ≤ horizon (β would change sign),
            0 < clip ≤ 1 and 0 ≤ low ≤ coef ≤ high.

    Reference:
        Ziegler et al., arXiv 1909.08593, section 2.2 (target in nats, Kβ = 0.1 per update; `samples / horizon`
        is their code's Kβ).

    >>> controller = linear_kl(6.0, horizon=100, samples=10)
    >>> round(float(controller.update(controller.init(), 60.0).coef), 4)
    0.204

    """
    (target,) = numbers(FLOAT, POSITIVE, target=target)
    horizon, samples = numbers(FLOAT, POSITIVE, "horizon and samples", horizon=horizon, samples=samples)
    (clip,) = numbers(FLOAT, _SHARE, clip=clip)
    require(clip * samples <= horizon, f"need clip · samples ≤ horizon, got {clip} · {samples} > {horizon}")
    coef, low, high = interval(NOT_NEGATIVE, coef, low, high)
    gain = samples / horizon

    def update(state: CoefState, measured: Measured) -> CoefState:
        kl = scalar(measured)
        error = jnp.clip(kl / target - 1.0, -clip, clip)
        return unless_nan(kl, CoefState(jnp.clip(state.coef * (1.0 + gain * error), low, high)), state)

    return Controller(lambda: CoefState(scalar(coef)), update)


def pid_kl(
    target: Number,
    coef: Number = 0.2,
    *,
    kp: Number = 0.1,
    ki: Number = 0.01,
    kd: Number = 0.0,
    low: Number = 0.0,
    high: Number = 10.0,
) -> Controller:
    """PID control of the coefficient, positional form, without wind-up.

    e = KL / target − 1;  βₜ₊₁ = clip(β₀ + kp·e + ki·Σe + kd·(e − e₋₁), low, high)

    While e pushes β against a limit, ki·Σe goes no further than takes it there: when the error turns, β leaves the
    limit at once instead of first working off what piled up.

    Args:
        target: KL to hold, in the units that are measured, > 0.
        coef: β₀, the coefficient at the start and without error.
        kp: proportional gain ≥ 0, β for each 100 % of error.
        ki: integral gain ≥ 0, per update; without it an error remains.
        kd: derivative gain ≥ 0; the first update has no derivative.
        low: smallest β.
        high: largest β; finite, so that an infinite KL has a finite answer.

    Returns:
        Controller; its state is PIDState(coef, integral, error, step).

    Raises:
        ValueError: unless target > 0, the gains are ≥ 0 and 0 ≤ low ≤ coef ≤ high < ∞.

    Reference:
        Åström and Hägglund, Advanced PID Control (2006), for integrator windup; for penalties in RL, Stooke et al.,
        arXiv 2007.03964.

    >>> controller = pid_kl(0.1, coef=1.0, kp=0.5, ki=0.25)
    >>> round(float(controller.update(controller.init(), 0.2).coef), 4)
    1.75

    """
    (target,) = numbers(FLOAT, POSITIVE, target=target)
    kp, ki, kd = numbers(FLOAT, NOT_NEGATIVE, "gains", kp=kp, ki=ki, kd=kd)
    coef, low, high = interval(ANY, coef, low, high)
    refused = f"need 0 ≤ low and a finite high, got low={low}, high={high}"
    require(low >= 0, refused)
    require(high < float("inf"), refused)
    largest = float(np.sqrt(np.finfo(np.float32).max))

    def init() -> PIDState:
        zero = scalar(0.0)
        return PIDState(scalar(coef), zero, zero, jnp.zeros((), jnp.int32))

    def update(state: PIDState, measured: Measured) -> PIDState:
        kl = scalar(measured)
        # Bounded, so that an infinite KL does not make the next difference of errors ∞ − ∞.
        error = jnp.clip(kl / target - 1.0, -largest, largest)
        slope = jnp.where(state.step == 0, 0.0, error - state.error)
        rest = coef + kp * error + kd * slope
        grown = state.integral + ki * error
        # As far as the limit needs, but not backwards: with a large proportional part that is not at all.
        up = jnp.clip(high - rest, state.integral, jnp.maximum(grown, state.integral))
        down = jnp.clip(low - rest, jnp.minimum(grown, state.integral), state.integral)
        integral = jnp.where(error > 0, jnp.minimum(grown, up), jnp.maximum(grown, down))
        output = jnp.clip(rest + integral, low, high)
        return unless_nan(kl, PIDState(output, integral, error, state.step + 1), state)

    return Controller(init, update)
