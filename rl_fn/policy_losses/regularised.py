"""Off-policy REINFORCE held back by a squared log-ratio (DRO, Kimi) or by tapered weights (TOPR)."""

import jax
import jax.numpy as jnp

from rl_fn._numerics import (
    POSITIVE,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    divide,
    numbers,
    require,
    same_shape,
)
from rl_fn.importance.ratios import LEVELS, log_ratio
from rl_fn.recurrence import segment_totals

SQUARES = ("token", "sequence_sum")


def dro(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    beta: Number,
    level: str = "token",
    segment_ids: Segments | None = None,
) -> Tokens:
    """Direct reward optimisation: REINFORCE with a quadratic pull to the policy that the data, or the KL, refer to.

    −(A log π − β/2 (log ρ)²);  ρ = π/π_old

    The paper squares the log-ratio of the whole answer (level "sequence_sum"), trainers that of each token.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log of the reference policy, for the same tokens, `*batch T`.
        advantages: A = reward − value, `*batch T`.
        mask: True where a token counts, `*batch T`.
        beta: β > 0, the paper's τ.
        level: "token", or "sequence_sum": (Σ log ρ)², an equal share of it at every token, so that a sequence's sum is
            the paper's.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for an unknown level or a beta that is not positive.

    Reference:
        Richemond et al. (DRO), arXiv 2405.19107, equation 8, divided by τ as it says there.

    >>> import jax.numpy as jnp
    >>> dro(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([1.0]), jnp.array([True]), beta=0.5).tolist()
    [2.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, segment_ids=segment_ids)
    require(level in SQUARES, f"level must be one of {SQUARES}, got {level!r}")
    new, a = as_float(logprobs, advantages)
    (beta,) = numbers(new.dtype, POSITIVE, beta=beta)
    counted = as_mask(mask)
    new, a = jnp.where(counted, new, 0.0), jnp.where(counted, a, 0.0)
    square = jnp.square(log_ratio(logprobs, old_logprobs, counted, level=level, segment_ids=segment_ids))
    if level == "sequence_sum":
        square = divide(square, segment_totals(counted.astype(a.dtype), segment_ids))
    return 0.5 * beta * square - a * new


def kimi(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    tau: Number,
    level: str = "token",
    segment_ids: Segments | None = None,
) -> Tokens:
    """Kimi k1.5's online mirror descent step; the formula is dro's, π_old being the policy of this iteration's start.

    −(A log π − τ/2 (log ρ)²);  ρ = π/π_old,  A = reward − mean of the group

    The paper squares the log-ratio of the whole answer (level "sequence_sum"), trainers that of each token.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`.
        tau: τ > 0.
        level: "token" or "sequence_sum", see dro.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for an unknown level or a tau that is not positive.

    Reference:
        Kimi Team (Kimi k1.5), arXiv 2501.12599, equation 3.

    >>> import jax.numpy as jnp
    >>> kimi(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([1.0]), jnp.array([True]), tau=0.5).tolist()
    [2.0]

    """
    (tau,) = numbers(as_float(logprobs)[0].dtype, POSITIVE, tau=tau)
    return dro(logprobs, old_logprobs, advantages, mask, beta=tau, level=level, segment_ids=segment_ids)


def topr(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    level: str = "sequence_sum",
    segment_ids: Segments | None = None,
) -> Tokens:
    """Tapered off-policy REINFORCE: good answers as in supervised learning, bad ones by a weight that fades out.

    −A log π where A ≥ 0;  −sg(min(ρ, 1)) A log π where A < 0;  ρ = Π over the sequence of π/μ

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log μ, the policy that sampled, for the same tokens, `*batch T`.
        advantages: A, the reward (less a baseline), `*batch T`.
        mask: True where a token counts, `*batch T`.
        level: of ρ: "sequence_sum" as in the paper, "token" or "sequence" (geometric mean).
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for an unknown level.

    Reference:
        Le Roux et al. (TOPR), arXiv 2503.14286, equation 8.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.5, 0.5]))
    >>> print(topr(new, old, -jnp.ones(2), jnp.ones(2, bool)) / new)
    [0.5 0.5]

    """
    require(level in LEVELS, f"level must be one of {LEVELS}, got {level!r}")
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, segment_ids=segment_ids)
    new, a = as_float(logprobs, advantages)
    counted = as_mask(mask)
    new, a = jnp.where(counted, new, 0.0), jnp.where(counted, a, 0.0)
    ratio = log_ratio(logprobs, old_logprobs, counted, level=level, segment_ids=segment_ids)
    weight = jnp.where(a < 0, jnp.exp(jnp.minimum(ratio, 0.0)), 1.0)
    return -jax.lax.stop_gradient(weight) * a * new
