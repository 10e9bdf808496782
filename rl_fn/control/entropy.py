"""A controller that holds the entropy of the policy at a target."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import NOT_NEGATIVE, POSITIVE, Array, Number, numbers
from rl_fn.control.kl import FLOAT, Controller, Measured, interval, scalar, unless_nan


class EntropyState(NamedTuple):
    """State of adaptive_entropy: the coefficient in force, and the level that it has when the entropy is too low."""

    coef: Float[Array, ""]
    level: Float[Array, ""]


def adaptive_entropy(
    target: Number,
    coef: Number = 0.0,
    *,
    step: Number = 0.005,
    low: Number = 0.0,
    high: Number = float("inf"),
) -> Controller:
    """Adapt the entropy bonus: its level rises while the entropy is under its target, and it acts only then.

    cₜ₊₁ = clip(cₜ ± Δ, low, high), + if H < target, − if H > target;  αₜ₊₁ = cₜ₊₁ if H ≤ target, else 0

    Args:
        target: entropy to keep, in nats a token, > 0.
        coef: c at the start; the bonus α is 0 until an entropy is measured.
        step: Δ > 0.
        low: smallest c.
        high: largest c.

    Returns:
        Controller; its state is EntropyState(coef, level): coef is α, level is c.

    Raises:
        ValueError: unless target and step are positive and 0 ≤ low ≤ coef ≤ high.

    Reference:
        He et al. (Skywork-OR1), arXiv 2505.22312, equation 3.2 (target 0.2, Δ 0.005, c₀ = 0).

    >>> controller = adaptive_entropy(0.2)
    >>> state = controller.update(controller.init(), 0.1)
    >>> round(float(state.coef), 4), float(controller.update(state, 0.5).coef)
    (0.005, 0.0)

    """
    target, step = numbers(FLOAT, POSITIVE, target=target, step=step)
    coef, low, high = interval(NOT_NEGATIVE, coef, low, high)

    def update(state: EntropyState, measured: Measured) -> EntropyState:
        entropy = scalar(measured)
        direction = jnp.sign(target - entropy)
        level = jnp.clip(state.level + step * direction, low, high)
        new = EntropyState(jnp.where(entropy <= target, level, 0.0), level)
        return unless_nan(entropy, new, state)

    return Controller(lambda: EntropyState(scalar(0.0), scalar(coef)), update)
