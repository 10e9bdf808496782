"""From per-token losses to one number that does not depend on how the batch was cut."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import (
    ANY,
    NOT_NEGATIVE,
    POSITIVE,
    Array,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    deviations,
    divide,
    numbers,
    require,
    same_shape,
    variance,
)
from rl_fn.recurrence import segment_starts, segment_totals

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)


class Ratio(NamedTuple):
    """A mean that has not been divided yet, so that parts from micro-batches, packs and ranks add up exactly.

    A denominator of 0 stands for a plain sum: dividing by it leaves the total (which is 0 when nothing counted).

    >>> import jax.numpy as jnp
    >>> parts = [Ratio(jnp.float32(3.0), jnp.float32(2.0)), Ratio(jnp.float32(5.0), jnp.float32(2.0))]
    >>> float(sum(parts).value())
    2.0
    """

    total: Float[Array, ""]
    denominator: Float[Array, ""]

    def __add__(self, other: "Ratio | int") -> "Ratio":  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(other, Ratio):
            return Ratio(self.total + other.total, self.denominator + other.denominator)
        # sum() starts from the integer 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    __radd__ = __add__

    def value(self) -> Float[Array, ""]:
        """Total / denominator; the total where the denominator is 0."""
        whole = self.denominator == 0
        return jnp.where(whole, self.total, self.total / jnp.where(whole, 1.0, self.denominator))


def aggregate_parts(
    x: Tokens,
    mask: Mask,
    mode: str,
    *,
    max_completion_length: Number | None = None,
    segment_ids: Segments | None = None,
) -> Ratio:
    """Undivided aggregation of per-token values; `.value()` of the sum of the parts is the aggregate of the whole.

    token-mean Σx / tokens;  token-sum Σx;  seq-mean-token-sum Σx / sequences;
    seq-mean-token-mean Σ_s (Σₜ x / tokens of s) / sequences;  seq-mean-token-sum-norm Σx / (L_max · sequences);
    prompt-mean Σ_p (Σ x / tokens of p) / prompts

    A sequence (prompt) without a counted token does not count. A sequence must lie whole in one part for
    seq-mean-token-mean, a prompt for prompt-mean. Counts are exact in float32 up to 2²⁴ tokens.

    Args:
        x: per-token values, `*batch T`; for prompt-mean `*batch G T`, the last two axes being one prompt.
        mask: True where a token counts, `*batch T`.
        mode: one of the above.
        max_completion_length: L_max, the generation budget in tokens, for seq-mean-token-sum-norm only.
        segment_ids: `*batch T`, equal and contiguous within a sequence, for several sequences packed into a row.

    Returns:
        Ratio(total, denominator) of scalars. token-sum has denominator 0.

    Raises:
        ValueError: for an unknown mode; max_completion_length missing, not positive, or given to another mode;
            segment_ids or a missing group axis with prompt-mean.

    Reference:
        token-mean: Yu et al. (DAPO), arXiv 2503.14476, equation 8; seq-mean-token-mean: Shao et al., arXiv 2402.03300,
        equation 3; seq-mean-token-sum-norm: Liu et al. (Dr. GRPO), arXiv 2503.20783, section 3.2.

    >>> import jax.numpy as jnp
    >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> float(aggregate_parts(x, mask, "seq-mean-token-mean").value())
    2.25

    """
    require(mode in MODES, f"mode must be one of {MODES}, got {mode!r}")
    normed = mode == "seq-mean-token-sum-norm"
    require(
        normed == (max_completion_length is not None),
        f"max_completion_length goes with seq-mean-token-sum-norm only: {mode=}, {max_completion_length=}",
    )
    same_shape(x=x, mask=mask, segment_ids=segment_ids)
    (values,) = as_float(x)
    counted = as_mask(mask)
    values, ones = jnp.where(counted, values, 0.0), counted.astype(values.dtype)
    if mode == "prompt-mean":
        require(values.ndim >= 2, f"prompt-mean needs a group axis, (*batch, G, T), got shape {values.shape}")
        require(segment_ids is None, "prompt-mean takes (*batch, G, T), not packed rows with segment_ids")
        tokens = jnp.sum(ones, axis=(-2, -1))
        prompts = jnp.sum(tokens > 0, dtype=values.dtype)
        return Ratio(jnp.sum(divide(jnp.sum(values, axis=(-2, -1)), tokens)), prompts)
    total = jnp.sum(jnp.sum(values, axis=-1))
    if mode == "token-sum":
        return Ratio(total, jnp.zeros_like(total))
    if mode == "token-mean":
        return Ratio(total, jnp.sum(ones))
    tokens = segment_totals(ones, segment_ids)
    sequences = jnp.sum(segment_starts(values.shape, segment_ids) & (tokens > 0), dtype=values.dtype)
    if mode == "seq-mean-token-mean":
        total = jnp.sum(jnp.sum(divide(values, tokens), axis=-1))
    if max_completion_length is None:
        return Ratio(total, sequences)
    (length,) = numbers(total.dtype, POSITIVE, max_completion_length=max_completion_length)
    return Ratio(total, length * sequences)


def aggregate(
    x: Tokens,
    mask: Mask,
    mode: str,
    *,
    denominator: Number | None = None,
    max_completion_length: Number | None = None,
    segment_ids: Segments | None = None,
) -> Float[Array, ""]:
    """One number from per-token values; the modes are those of aggregate_parts.

    total / denominator

    Args:
        x: per-token values, `*batch T`; for prompt-mean `*batch G T`.
        mask: True where a token counts, `*batch T`.
        mode: see aggregate_parts.
        denominator: what to divide by instead of this call's own count: tokens, sequences, prompts, or L_max ·
            sequences of the whole batch. The results of its micro-batches then add up to the whole's. 0 divides by
            nothing.
        max_completion_length: L_max, the generation budget in tokens, for seq-mean-token-sum-norm only.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Scalar; 0 when nothing counts.

    Raises:
        ValueError: as aggregate_parts.

    Reference:
        See aggregate_parts.

    >>> import jax.numpy as jnp
    >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> float(aggregate(x, mask, "token-mean")), float(aggregate(x, mask, "token-mean", denominator=6.0))
    (2.0, 1.0)

    """
    parts = aggregate_parts(x, mask, mode, max_completion_length=max_completion_length, segment_ids=segment_ids)
    if denominator is None:
        return parts.value()
    (by,) = numbers(parts.total.dtype, ANY, denominator=denominator)
    return Ratio(parts.total, jnp.asarray(by, parts.total.dtype)).value()


def masked_sum(
    x: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Sum of the masked-in entries.

    Σ x over entries with mask

    Args:
        x: any shape.
        mask: True where an entry counts, the same shape.
        axis: axis or axes to reduce, static; all by default.

    Returns:
        x without the reduced axes; 0 where nothing counts.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        None: a definition.

    >>> import jax.numpy as jnp
    >>> float(masked_sum(jnp.array([1.0, jnp.nan]), jnp.array([True, False])))
    1.0

    """
    same_shape(x=x, mask=mask)
    (values,) = as_float(x)
    return jnp.sum(jnp.where(as_mask(mask), values, 0.0), axis=axis)


def masked_mean(
    x: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Mean of the masked-in entries.

    Σ x / n over the n entries with mask

    Args:
        x: any shape.
        mask: True where an entry counts, the same shape.
        axis: axis or axes to reduce, static; all by default.

    Returns:
        x without the reduced axes; 0 where nothing counts.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        None: a definition.

    >>> import jax.numpy as jnp
    >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])))
    2.0

    """
    total = masked_sum(x, mask, axis=axis)
    return divide(total, jnp.sum(as_mask(mask), axis=axis, dtype=total.dtype))


def masked_var(
    x: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    axis: int | tuple[int, ...] | None = None,
    ddof: Number = 1,
) -> Float[Array, "..."]:
    """Variance of the masked-in entries, in two passes.

    Σ (x − mean)² / (n − ddof) over the n entries with mask

    Args:
        x: any shape.
        mask: True where an entry counts, the same shape.
        axis: axis or axes to reduce, static; all by default.
        ddof: 1 for the unbiased variance, 0 for the population's.

    Returns:
        x without the reduced axes; 0 where n ≤ ddof, and exactly 0 for equal entries.

    Raises:
        ValueError: if ddof is negative.

    Reference:
        None: a definition.

    >>> import jax.numpy as jnp
    >>> float(masked_var(jnp.array([10001.0, 10003.0]), jnp.ones(2, bool)))
    2.0

    """
    same_shape(x=x, mask=mask)
    (values,) = as_float(x)
    (ddof,) = numbers(values.dtype, NOT_NEGATIVE, ddof=ddof)
    _, deviation, count = deviations(values, as_mask(mask), axis=axis)
    return jnp.squeeze(variance(deviation, count, axis, ddof), axis=axis)
