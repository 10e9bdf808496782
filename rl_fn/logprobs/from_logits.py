"""Log-probability, entropy and log-sum-exp of tokens from logits: what the kernels are measured against."""

import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_float, keep, same_shape
from rl_fn.logprobs.row_state import (
    AllowedTokens,
    Logits,
    PerRow,
    TokenIds,
    TokenLogprobs,
    finalize_row_state,
    row_state,
)
from rl_fn.recurrence import segment_totals


def logits_logprobs(
    logits: Logits,
    tokens: TokenIds,
    *,
    temperature: Number | Float[Array, "..."] = 1.0,
    softcap: Number | None = None,
    allowed_tokens: AllowedTokens | None = None,
) -> TokenLogprobs:
    """Log-probability of each token and entropy of the distribution it was drawn from.

    x = softcap · tanh(logits / softcap) / temperature;  lse = log Σ eˣ;  log π = x_token − lse;  H = lse − Σ π x

    Args:
        logits: `*batch V`, any float dtype; −inf excludes an entry.
        tokens: token ids in [0, V), `*batch`.
        temperature: > 0, a number or one per token, `*batch`.
        softcap: the model's cap, applied before the temperature; none by default.
        allowed_tokens: True for entries in the distribution (a top-k or top-p set), `*batch V` or `V`; the others are
            excluded and the rest renormalised.

    Returns:
        TokenLogprobs(logprobs, entropy, logsumexp), each `*batch`. A token that is not allowed has −inf with gradient
        0; the entropy and its gradient are always finite.

    Raises:
        ValueError: for a softcap or a temperature (as a number) that is not positive.

    Reference:
        Shannon, A Mathematical Theory of Communication (1948), section 6, for H; the softcap: Gemma Team, arXiv
        2408.00118.

    >>> import jax.numpy as jnp
    >>> out = logits_logprobs(jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.array([0]))
    >>> print(out.logprobs.round(4), out.entropy.round(4))
    [-0.6931] [0.6931]

    """
    return finalize_row_state(
        row_state(logits, tokens, temperature=temperature, softcap=softcap, allowed_tokens=allowed_tokens)
    )


def sequence_logprobs(logprobs: Tokens, mask: Mask, *, segment_ids: Segments | None = None) -> Tokens | PerRow:
    """Log-probability of each sequence.

    Σₜ log π(tokenₜ)

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        mask: True where a token counts, `*batch T`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch`; with segment_ids `*batch T`, at each counted token the sum over its sequence, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        None: the chain rule of probability.

    >>> import jax.numpy as jnp
    >>> sequence_logprobs(jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [-3.0]

    """
    same_shape(logprobs=logprobs, mask=mask, segment_ids=segment_ids)
    (values,) = as_float(logprobs)
    values = keep(values, mask)
    if segment_ids is None:
        return jnp.sum(values, axis=-1)
    return keep(segment_totals(values, segment_ids), mask)
