"""Losses and weights of single responses, without a partner to compare with."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from rl_fn._numerics import (
    NOT_NEGATIVE,
    Array,
    Mask,
    Number,
    Tokens,
    as_float,
    as_mask,
    divide,
    exp,
    keep,
    numbers,
    repeating,
    same_shape,
)
from rl_fn._pairs import PairMask, Pairs, beta_of


def kto(
    logprobs: Pairs,
    ref_logprobs: Pairs,
    desirable: Bool[Array, "*batch"],
    kl: Number | Float[Array, "..."],
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    desirable_weight: Number = 1.0,
    undesirable_weight: Number = 1.0,
) -> Pairs:
    """Kahneman-Tversky optimisation: the value of a response saturates on both sides of a reference point.

    desirable: λ_D (1 − σ(β(r − z)));  undesirable: λ_U (1 − σ(β(z − r)));  r = log π/π_ref,  z = KL(π‖π_ref)

    Args:
        logprobs: log π of the whole response, in nats, `*batch`.
        ref_logprobs: log π_ref of the response, `*batch`.
        desirable: True for a response to make likelier, `*batch`.
        kl: z ≥ 0, a number or `*batch` (1 where it repeats), as kto_kl estimates it; no gradient flows through it.
        mask: True where a response counts, `*batch`; without it every response does.
        beta: β > 0.
        desirable_weight: λ_D ≥ 0.
        undesirable_weight: λ_U ≥ 0.

    Returns:
        Loss per response, `*batch`, between 0 and its weight, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or a negative weight.

    Reference:
        Ethayarajh et al., arXiv 2402.01306.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(2)
    >>> kto(zero, zero, jnp.array([True, False]), 0.0).tolist()
    [0.5, 0.5]

    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable, mask=mask)
    (kl,) = repeating(np.shape(logprobs), kl=kl)
    new, ref, z = as_float(logprobs, ref_logprobs, kl)
    beta = beta_of(new, beta)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    desirable_weight, undesirable_weight = numbers(new.dtype, NOT_NEGATIVE, "weights", **weights)
    gain = beta * (keep(new, mask) - keep(ref, mask) - keep(jax.lax.stop_gradient(z), mask))
    good = jnp.asarray(desirable)
    loss = jnp.where(good, desirable_weight, undesirable_weight) * jax.nn.sigmoid(jnp.where(good, -gain, gain))
    return keep(loss, mask)


def kto_kl(logprobs: Pairs, ref_logprobs: Pairs, mask: PairMask | None = None) -> Float[Array, ""]:
    """KTO's estimate of its reference point from responses matched with prompts that they do not belong to.

    max(0, mean log π(y′|x)/π_ref(y′|x)), without gradient

    Args:
        logprobs: log π of the mismatched responses, in nats, `*batch`.
        ref_logprobs: log π_ref of the same responses, `*batch`.
        mask: True where a response counts, `*batch`; without it every response does.

    Returns:
        Scalar ≥ 0; 0 where nothing counts. Average it over ranks before the maximum by passing all their responses.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Ethayarajh et al., arXiv 2402.01306.

    >>> import jax.numpy as jnp
    >>> float(kto_kl(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0])))
    0.5

    """
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    new, ref = as_float(logprobs, ref_logprobs)
    ratio = jax.lax.stop_gradient(keep(new, mask) - keep(ref, mask))
    count = ratio.size if mask is None else jnp.sum(as_mask(mask), dtype=ratio.dtype)
    return jnp.maximum(divide(jnp.sum(ratio), jnp.asarray(count, ratio.dtype)), 0.0)


def wpo_weights(
    logprobs: Tokens, mask: Mask | None = None, *, sum_squared_probs: Float[Array, "*batch T"] | None = None
) -> Float[Array, "*batch"]:
    """Weight of an off-policy response by how likely the policy is to write it; a pair has the product of its two.

    exp(mean over tokens of [log π(yₜ) − log Σᵥ π(v)²]), without gradient

    Without sum_squared_probs the second term is left out: the paper's plain weight. With it, its sampled alignment: a
    response drawn from the policy has a weight near 1 whatever the entropy.

    Args:
        logprobs: log π of the tokens of each response, in nats, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        sum_squared_probs: Σᵥ π(v)² at each token, `*batch T`; none by default.

    Returns:
        Weight per response, `*batch`; 0 for a response without tokens.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Zhou et al. (WPO), arXiv 2406.11827, equation 2.

    >>> import jax.numpy as jnp
    >>> half = jnp.log(jnp.array([[0.5, 0.5]]))
    >>> wpo_weights(half).tolist(), wpo_weights(half, sum_squared_probs=jnp.array([[0.5, 0.5]])).tolist()
    ([0.5], [1.0])

    """
    same_shape(logprobs=logprobs, mask=mask, sum_squared_probs=sum_squared_probs)
    (tokens,) = as_float(logprobs)
    counted = jnp.ones(tokens.shape, bool) if mask is None else as_mask(mask)
    if sum_squared_probs is not None:
        tokens, squares = as_float(tokens, sum_squared_probs)
        tokens = tokens - jnp.log(jnp.where(counted, squares, 1.0))
    count = jnp.sum(counted, axis=-1, dtype=tokens.dtype)
    mean = divide(jnp.sum(keep(tokens, counted), axis=-1), count)
    return jax.lax.stop_gradient(jnp.where(count > 0, exp(mean), 0.0))
