"""The log-probability operations for JAX arrays: Pallas on a TPU, rl_fn's own formula elsewhere.

The torch operations of `rl_kernels` have the same names and the same results.
"""

from typing import Any

import jax
import jax.numpy as jnp

import rl_fn
from rl_kernels.pallas_math import Options

BACKENDS = ("pallas", "reference")


def logits_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    support: jax.Array | None = None,
    block_rows: int = 256,
    block_entries: int = 2048,
    backend: str | None = None,
) -> rl_fn.TokenLogprobs:
    """Log-probability, entropy and logsumexp of softmax(cap(logits)/temperature) in float32, differentiable in logits.

    Args:
        logits: ``*batch V``; −inf excludes an entry.
        tokens: token ids, ``*batch``, or ``*batch K`` for K tokens a row.
        temperature: > 0, a number or ``*batch``.
        softcap: cap before the temperature, or None.
        support: the kept set, bool ``*batch V`` or ``V``.
        block_rows: rows of a block, a multiple of 8 on a TPU.
        block_entries: entries of the vocabulary in a block, a multiple of 128 on a TPU.
        backend: "pallas" (on a CPU in Pallas's interpreter) or "reference" (rl_fn through XLA). None is "pallas" on a
            TPU and "reference" elsewhere.

    Returns:
        ``rl_fn.TokenLogprobs``: logprobs shaped as tokens, entropy and logsumexp ``*batch``.

    Raises:
        ValueError: shapes that do not fit, a temperature (as a number) or softcap that is not positive.
        NotImplementedError: an unknown backend.

    >>> out = logits_logprobs(jnp.zeros((1, 4)), jnp.array([2]), backend="pallas")
    >>> print(out.logprobs.round(4), out.entropy.round(4))
    [-1.3863] [1.3863]

    """
    batch = logits.shape[:-1]
    if _resolve(backend) == "reference" or 0 in batch:
        return _reference(logits, tokens, temperature, softcap, support)
    ids, inverse, kept = _rows(batch, logits.shape[-1], tokens, temperature, softcap, support)
    # Imported here: where the reference is meant Pallas is not needed.
    from rl_kernels.logits_logprobs.pallas import run

    options = _options(len(ids), logits.shape[-1], softcap, kept, block_rows, block_entries)
    results = run(logits.reshape(len(ids), logits.shape[-1]), ids, inverse, kept, options)
    return _shaped(results, tokens.shape, batch)


def linear_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    *,
    bias: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    support: jax.Array | None = None,
    block_rows: int = 256,
    block_entries: int = 256,
    backend: str | None = None,
) -> rl_fn.TokenLogprobs:
    """``logits_logprobs`` of ``hidden @ weight.T + bias`` without the logits, differentiable in all three.

    Args:
        hidden: ``*batch H``.
        weight: ``V H``, of hidden's dtype.
        tokens: token ids, ``*batch``, or ``*batch K`` for K tokens a row.
        bias: ``V``; none by default.
        temperature: > 0, a number or ``*batch``.
        softcap: cap before the temperature, or None.
        support: the kept set, bool ``*batch V`` or ``V``.
        block_rows: rows of a block, a multiple of 8 on a TPU; block_rows · H and block_entries · H must fit its memory.
        block_entries: entries of the vocabulary in a block, a multiple of 128 on a TPU.
        backend: "pallas" (on a CPU in Pallas's interpreter) or "reference" (rl_fn through XLA, tile by tile). None is
            "pallas" on a TPU and "reference" elsewhere.

    Returns:
        ``rl_fn.TokenLogprobs``: logprobs shaped as tokens, entropy and logsumexp ``*batch``.

    Raises:
        ValueError: shapes that do not fit, a temperature (as a number) or softcap that is not positive.
        NotImplementedError: an unknown backend.

    >>> out = linear_logprobs(jnp.ones((1, 2)), jnp.zeros((4, 2)), jnp.array([3]), backend="pallas")
    >>> print(out.logprobs.round(4))
    [-1.3863]

    """
    batch = hidden.shape[:-1]
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be (V, {hidden.shape[-1]}), got {weight.shape}")
    if _resolve(backend) == "reference" or 0 in batch:
        if support is None or support.ndim == 1:
            return _linear_reference(hidden, weight, tokens, bias, temperature, softcap, support)
        logits = jax.lax.dot_general(
            hidden.astype(jnp.float32),
            weight.astype(jnp.float32),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
        )
        shift = 0.0 if bias is None else bias.astype(jnp.float32).reshape((1,) * len(batch) + bias.shape)
        return _reference(logits + shift, tokens, temperature, softcap, support)
    ids, inverse, kept = _rows(batch, len(weight), tokens, temperature, softcap, support)
    from rl_kernels.linear_logprobs.pallas import run

    options = _options(len(ids), len(weight), softcap, kept, block_rows, block_entries)
    shift = jnp.zeros(len(weight), jnp.float32) if bias is None else bias
    results = run(hidden.reshape(len(ids), hidden.shape[-1]), weight, shift, ids, inverse, kept, options)
    return _shaped(results, tokens.shape, batch)


def _shaped(results: Any, tokens: tuple[int, ...], batch: tuple[int, ...]) -> rl_fn.TokenLogprobs:
    logprobs, entropy, logsumexp = results
    return rl_fn.TokenLogprobs(logprobs.reshape(tokens), entropy.reshape(batch), logsumexp.reshape(batch))


def _resolve(backend: str | None) -> str:
    name = ("pallas" if jax.default_backend() == "tpu" else "reference") if backend is None else backend
    if name not in BACKENDS:
        raise NotImplementedError(f"no backend {name!r} for JAX arrays; available: {', '.join(BACKENDS)}")
    return name


def _rows(batch, vocabulary, tokens, temperature, softcap, support):
    """Arguments a row: ids [N, K], 1/temperature [N], kept int8 [N, V] or None."""
    if tokens.shape != batch and tokens.shape[:-1] != batch:
        raise ValueError(f"tokens must have shape {batch}, with or without a last axis of K tokens, got {tokens.shape}")
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    count = 1
    for size in batch:
        count *= size
    inverse = jnp.broadcast_to(1.0 / jnp.asarray(temperature, jnp.float32), batch).reshape(count)
    kept = None
    if support is not None:
        kept = jnp.broadcast_to(support, (*batch, vocabulary)).reshape(count, vocabulary).astype(jnp.int8)
    width = 1 if tokens.shape == batch else tokens.shape[-1]
    return tokens.reshape(count, width).astype(jnp.int32), inverse, kept


def _options(count, vocabulary, softcap, kept, block_rows, block_entries):
    def fitting(block, size, unit):
        return min(block, -(-size // unit) * unit)

    return Options(
        vocabulary,
        softcap,
        kept is not None,
        fitting(block_rows, max(count, 1), 8),
        fitting(block_entries, vocabulary, 128),
        jax.default_backend() != "tpu",
    )


def _reference(logits, tokens, temperature, softcap, support):
    def one(ids):
        return rl_fn.logits_logprobs(logits, ids, temperature=temperature, softcap=softcap, support=support)

    return _each(one, logits.shape[:-1], tokens)


def _linear_reference(hidden, weight, tokens, bias, temperature, softcap, support):
    def one(ids):
        return rl_fn.linear_logprobs(
            hidden, weight, ids, bias=bias, temperature=temperature, softcap=softcap, support=support
        )

    return _each(one, hidden.shape[:-1], tokens)


def _each(one, batch, tokens):
    """Of K tokens a row: log-probabilities of each, entropy and logsumexp once."""
    if tokens.shape == batch:
        return one(tokens)
    results = [one(tokens[..., k]) for k in range(tokens.shape[-1])]
    row = results[0] if results else one(jnp.zeros(batch, jnp.int32))
    logprobs = jnp.stack([r.logprobs for r in results], -1) if results else jnp.zeros((*batch, 0), jnp.float32)
    return rl_fn.TokenLogprobs(logprobs, row.entropy, row.logsumexp)
