"""What an objective reads: one NamedTuple of per-token arrays."""

from typing import NamedTuple

import jax.numpy as jnp

from rl_fn._numerics import Mask, Segments, Tokens, as_float, as_mask


class Batch(NamedTuple):
    """What an objective reads, per token, `*batch T`; masked positions may hold anything.

    logprobs (π, differentiated), old_logprobs (π_old, which the update started from), advantages, mask;
    rollout_logprobs (μ, which sampled), ref_logprobs, entropies (differentiated), segment_ids (packed rows).
    """

    logprobs: Tokens
    old_logprobs: Tokens
    advantages: Tokens
    mask: Mask
    rollout_logprobs: Tokens | None = None
    ref_logprobs: Tokens | None = None
    entropies: Tokens | None = None
    segment_ids: Segments | None = None


def sanitised(batch: Batch) -> Batch:
    """Return the batch in one dtype, zero where masked: what is there can then reach no value and no gradient."""
    mask = as_mask(batch.mask)
    names = [
        name
        for name, value in zip(batch._fields, batch, strict=True)
        if value is not None and name not in ("mask", "segment_ids")
    ]
    arrays = as_float(*(getattr(batch, name) for name in names))
    kept = {name: jnp.where(mask, x, 0.0) for name, x in zip(names, arrays, strict=True)}
    return batch._replace(mask=mask, **kept)
