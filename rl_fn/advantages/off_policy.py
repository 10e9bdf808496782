"""Returns and advantages from a critic for tokens that another policy sampled, and the n-step return."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import (
    ANY,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT,
    Array,
    Constant,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    exp,
    known,
    log,
    numbers,
    per_row,
    require,
    same_shape,
)
from rl_fn.advantages.returns import Advantages, discounted_returns
from rl_fn.recurrence import following_recurrence, next_counted


def _truncated(log_ratios: jax.Array, cap: Constant) -> jax.Array:
    """min(cap, exp(log ratio)) without ever computing an exponential that overflows."""
    return jnp.minimum(jnp.exp(jnp.minimum(log_ratios, log(cap) + 1.0)), cap)


def n_step(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    n: int,
    gamma: Number = 1.0,
    bootstrap: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Advantages:
    """n-step returns, and advantages as their distance to the critic.

    Gₜ = Σ_{k<n} γᵏ rₜ₊ₖ + γⁿ Vₜ₊ₙ;  A = G − V

    With n at least the number of tokens left this is the Monte Carlo return (plus the discounted bootstrap). The cost
    grows with log n, not with n.

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        mask: True where a token counts, `*batch T`; the others are skipped, t + k is the k-th counted token after t.
        n: number of rewards before the critic takes over, ≥ 1, static.
        gamma: discount, in [0, 1].
        bootstrap: value after the last token (of every segment), a number or `*batch`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns), both `*batch T`, zero where masked.

    Raises:
        ValueError: if n < 1 or gamma is outside [0, 1].

    Reference:
        Sutton & Barto, Reinforcement Learning (2018), chapter 7.

    >>> import jax.numpy as jnp
    >>> rewards, values = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.5, 0.25, 0.125])
    >>> n_step(rewards, values, jnp.ones(3, bool), n=2).returns.tolist()
    [3.125, 6.0, 4.0]

    """
    require(n >= 1, f"n must be at least 1, got {n}")
    same_shape(rewards=rewards, values=values, mask=mask, segment_ids=segment_ids)
    (bootstrap,) = per_row(rewards.shape[:-1], ANY, bootstrap=bootstrap)
    r, v, last = as_float(rewards, values, bootstrap)
    (gamma,) = numbers(r.dtype, UNIT, gamma=gamma)
    counted = as_mask(mask)
    r, v = jnp.where(counted, r, 0.0), jnp.where(counted, v, 0.0)
    length = v.shape[-1]
    if length == 0:
        return Advantages(v, v)
    # One slot behind the row stands for "after the last token": it maps to itself and holds the bootstrap.
    slot = jnp.zeros_like(r[..., :1])
    position = jnp.broadcast_to(jnp.arange(length, dtype=r.dtype), r.shape)
    behind = jnp.asarray(length, r.dtype)
    following = jnp.concatenate([next_counted(position, counted, behind, segment_ids), slot + behind], axis=-1)
    following = following.astype(jnp.int32)
    added, decay = (
        jnp.concatenate([r, slot], axis=-1),
        jnp.concatenate([gamma + jnp.zeros_like(r), slot + 1.0], axis=-1),
    )
    column = last[..., None] if last.ndim else last
    returns = jnp.concatenate([v, slot + column], axis=-1)

    def at(x: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, where, axis=-1, mode="clip")

    # x ↦ added + decay · x[following] composed with itself n times, by repeated squaring.
    # More steps than the row is long change nothing, and are saved where the length is no symbol of jax.export.
    steps = min(n, length) if isinstance(length, int) else n
    while True:
        if steps % 2:
            returns = added + decay * at(returns, following)
        steps //= 2
        if steps == 0:
            break
        added = added + decay * at(added, following)
        decay = decay * at(decay, following)
        following = at(following, following)
    returns = jnp.where(counted, returns[..., :length], 0.0)
    return Advantages(jnp.where(counted, returns - v, 0.0), returns)


def vtrace(
    rewards: Tokens,
    values: Tokens,
    log_ratios: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    rho_clip: Number = 1.0,
    c_clip: Number = 1.0,
    lam: Number = 1.0,
    bootstrap: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Advantages:
    """V-trace targets and the policy-gradient advantages that go with them.

    vₜ = Vₜ + ρₜδₜ + γcₜ(vₜ₊₁ − Vₜ₊₁);  Aₜ = ρₜ(rₜ + γvₜ₊₁ − Vₜ);  δₜ = rₜ + γVₜ₊₁ − Vₜ

    ρₜ = min(ρ̄, π/μ), cₜ = λ min(c̄, π/μ). On-policy with ρ̄ = c̄ = 1, v is the λ-return. ρ̄ decides which policy's value
    the targets converge to (π's only without truncation), c̄ only how fast: the paper assumes ρ̄ ≥ c̄.

    λ is IMPALA's (its remark 2): it shortens the traces, and the advantage looks ahead to vₜ₊₁ whatever λ is. For λ < 1
    rlax's advantages are others: they look ahead to λvₜ₊₁ + (1 − λ)Vₜ₊₁.

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        log_ratios: log π/μ of the sampled tokens, π the policy being learned, μ the one that sampled, `*batch T`. No
            gradient flows through them.
        mask: True where a token counts, `*batch T`; t + 1 is the next counted token.
        gamma: discount, in [0, 1].
        rho_clip: ρ̄ > 0.
        c_clip: c̄ > 0.
        lam: λ in [0, 1].
        bootstrap: value after the last token (of every segment), a number or `*batch`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns): A (already weighted by ρ) and v, both `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma or lam is outside [0, 1], or a clip is not positive.

    Reference:
        Espeholt et al. (IMPALA), arXiv 1802.01561, section 4.1 (λ: its remark 2) and section 4.2 for the advantage.

    >>> import jax.numpy as jnp
    >>> log_ratios = jnp.log(jnp.array([0.5, 4.0]))
    >>> vtrace(jnp.array([0.0, 1.0]), jnp.zeros(2), log_ratios, jnp.ones(2, bool)).advantages.tolist()
    [0.5, 1.0]

    """
    same_shape(rewards=rewards, values=values, log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    (bootstrap,) = per_row(rewards.shape[:-1], ANY, bootstrap=bootstrap)
    r, v, ratio, last = as_float(rewards, values, log_ratios, bootstrap)
    gamma, lam = numbers(r.dtype, UNIT, gamma=gamma, lam=lam)
    rho_clip, c_clip = numbers(r.dtype, POSITIVE, "clips", rho_clip=rho_clip, c_clip=c_clip)
    counted = as_mask(mask)
    r, v, ratio = (jnp.where(counted, x, 0.0) for x in (r, v, ratio))
    ratio = jax.lax.stop_gradient(ratio)
    rho, trace = _truncated(ratio, rho_clip), lam * _truncated(ratio, c_clip)
    # vₜ = (1 − ρₜ)Vₜ + ρₜrₜ + γ(ρₜ − cₜ)Vₜ₊₁ + γcₜvₜ₊₁: the third term needs a scan of its own, and is often 0.
    inputs = (1.0 - rho) * v + rho * r
    if not known(lam, rho_clip, c_clip) or lam != 1 or rho_clip != c_clip:
        inputs = inputs + gamma * (rho - trace) * next_counted(v, counted, last, segment_ids)
    after = following_recurrence(gamma * trace, inputs, counted, last, segment_ids)
    targets = inputs + gamma * trace * after
    advantages = rho * (r + gamma * after - v)
    return Advantages(jnp.where(counted, advantages, 0.0), jnp.where(counted, targets, 0.0))


def retrace(
    rewards: Tokens,
    values: Tokens,
    log_ratios: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    lam: Number = 1.0,
    c_clip: Number = 1.0,
    bootstrap: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Advantages:
    """Retrace(λ) with a state-value critic: the action taken is not reweighted, what follows it is.

    δₜ = rₜ + γVₜ₊₁ − Vₜ;  Aₜ = δₜ + γcₜ₊₁Aₜ₊₁;  cₜ = λ min(c̄, π/μ)

    The paper corrects Q(s, a) with E_π Q at the next state; here V stands for both. A + V then estimates Q of the token
    taken: it is a target for V only on-policy (where A is GAE's), use vtrace for that otherwise.

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        log_ratios: log π/μ of the sampled tokens, `*batch T`. No gradient flows through them.
        mask: True where a token counts, `*batch T`; t + 1 is the next counted token.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1].
        c_clip: c̄ > 0; 1 in the paper.
        bootstrap: value after the last token (of every segment), a number or `*batch`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns): A and A + V, both `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma or lam is outside [0, 1], or c_clip is not positive.

    Reference:
        Munos et al., arXiv 1606.02647.

    >>> import jax.numpy as jnp
    >>> log_ratios = jnp.log(jnp.array([4.0, 0.5]))
    >>> retrace(jnp.array([0.0, 1.0]), jnp.zeros(2), log_ratios, jnp.ones(2, bool)).advantages.tolist()
    [0.5, 1.0]

    """
    same_shape(rewards=rewards, values=values, log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    (bootstrap,) = per_row(rewards.shape[:-1], ANY, bootstrap=bootstrap)
    r, v, ratio, last = as_float(rewards, values, log_ratios, bootstrap)
    gamma, lam = numbers(r.dtype, UNIT, gamma=gamma, lam=lam)
    (c_clip,) = numbers(r.dtype, POSITIVE, c_clip=c_clip)
    counted = as_mask(mask)
    r, v, ratio = (jnp.where(counted, x, 0.0) for x in (r, v, ratio))
    trace = jax.lax.stop_gradient(lam * _truncated(ratio, c_clip))
    # One recurrence, as in gae: U = V + cA, Uₜ = (1 − cₜ)Vₜ + cₜrₜ + γcₜUₜ₊₁, Aₜ = rₜ + γUₜ₊₁ − Vₜ.
    after = following_recurrence(gamma * trace, (1.0 - trace) * v + trace * r, counted, last, segment_ids)
    advantages = jnp.where(counted, r + gamma * after - v, 0.0)
    return Advantages(advantages, jnp.where(counted, advantages + v, 0.0))


def clipped_importance_advantages(
    rewards: Tokens,
    values: Tokens,
    log_ratios: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    segment_ids: Segments | None = None,
) -> Advantages:
    """Monte Carlo advantages whose return is reweighted by the token's own clipped ratio.

    Aₜ = clip(π/μ, 1 − ε_low, 1 + ε_high) Gₜ − Vₜ;  Gₜ = rₜ + γGₜ₊₁

    Biased, twice: only the ratio of token t is used though G depends on every later token, and that ratio is clipped.
    The bias vanishes on-policy. vtrace corrects the later tokens too.

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        log_ratios: log π/μ of the sampled tokens, `*batch T`. No gradient flows through them.
        mask: True where a token counts, `*batch T`; the recursion jumps over the others.
        gamma: discount, in [0, 1].
        clip_low: ε_low in [0, 1].
        clip_high: ε_high ≥ 0.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns): A and the uncorrected G, both `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma or clip_low is outside [0, 1], or clip_high is negative.

    Reference:
        None: a baseline for comparison; the clip is PPO's (arXiv 1707.06347).

    >>> import jax.numpy as jnp
    >>> log_ratios = jnp.log(jnp.array([4.0, 1.0]))
    >>> estimate = clipped_importance_advantages(
    ...     jnp.array([0.0, 1.0]), jnp.zeros(2), log_ratios, jnp.ones(2, bool), clip_high=0.25
    ... )
    >>> estimate.advantages.tolist()
    [1.25, 1.0]

    """
    same_shape(rewards=rewards, values=values, log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    r, v, ratio = as_float(rewards, values, log_ratios)
    (clip_low,) = numbers(r.dtype, UNIT, clip_low=clip_low)
    (clip_high,) = numbers(r.dtype, NOT_NEGATIVE, clip_high=clip_high)
    counted = as_mask(mask)
    v, ratio = jnp.where(counted, v, 0.0), jnp.where(counted, ratio, 0.0)
    weight = jax.lax.stop_gradient(jnp.clip(exp(ratio), 1.0 - clip_low, 1.0 + clip_high))
    returns = discounted_returns(r, counted, gamma=gamma, segment_ids=segment_ids)
    return Advantages(jnp.where(counted, weight * returns - v, 0.0), returns)
