"""The log-probability operations for JAX arrays: Pallas on a TPU and, on request, a GPU; rl_fn's formula elsewhere.

The torch operations of `rl_kernels` have the same names and the same results.
"""

from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rl_fn
from rl_kernels.common.pallas_helpers import LEFT_OUT, Options, matmul

BACKENDS = ("pallas", "pallas_gpu", "reference")
# The kernels that "pallas" means on a kind of device: on a CPU a TPU's kernels in Pallas's interpreter.
_PALLAS = {"tpu": "pallas", "cpu": "pallas", "gpu": "pallas_gpu"}
_MODULES = {"pallas": "rl_kernels.{}.pallas_tpu", "pallas_gpu": "rl_kernels.experimental.pallas_gpu.{}"}
WORKSPACE = 256 << 20


def logits_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: jax.Array | None = None,
    mask: jax.Array | None = None,
    block_tokens: int | None = None,
    block_vocab: int | None = None,
    backend: str | None = None,
) -> rl_fn.TokenLogprobs:
    """Log-probability, entropy and logsumexp of softmax(x) in float32, differentiable in logits.

    x = softcap·tanh(logit_scale·logits/softcap)/temperature, over the allowed tokens.

    Args:
        logits: ``*batch V``; −inf excludes a token.
        tokens: token ids, ``*batch``, or ``*batch K`` for K tokens a row.
        temperature: > 0, a number or ``*batch``.
        logit_scale: the model's own factor of the logits (Cohere's, Granite's), before the cap.
        softcap: cap before the temperature, or None.
        allowed_tokens: those a truncated sampler may draw, bool ``*batch V`` or ``V``.
        mask: bool ``*batch``; where False the row's results are 0 and it has no gradient, whatever its logits are.
        block_tokens: rows of logits in a block: on a TPU a multiple of 8 (256 by default), on a GPU a power of two (1).
        block_vocab: tokens of the vocabulary in a block: on a TPU a multiple of 128 (2048), on a GPU a power of two
            (4096).
        backend: "pallas" (on a CPU a TPU's kernels in Pallas's interpreter), "pallas_gpu" (a GPU's, on a CPU in the
            interpreter) or "reference" (rl_fn through XLA). None is "pallas" on a TPU and "reference" elsewhere:
            the GPU kernels have not run on a GPU yet, and run on request only.

    Returns:
        ``rl_fn.TokenLogprobs``: logprobs shaped as tokens, entropy and logsumexp ``*batch``.

    Raises:
        ValueError: shapes that do not fit, a temperature (as a number), scale or softcap that is not positive, blocks
            that are no power of two for a GPU's kernels.
        NotImplementedError: a backend that does not exist or has no kernels for this device.

    >>> out = logits_logprobs(jnp.zeros((1, 4)), jnp.array([2]), backend="pallas")
    >>> print(out.logprobs.round(4), out.entropy.round(4))
    [-1.3863] [1.3863]

    """
    batch, vocab_size = logits.shape[:-1], logits.shape[-1]
    rows = _rows(batch, vocab_size, tokens, temperature, logit_scale, softcap, allowed_tokens, mask)
    name = _resolve(backend)
    if name == "reference" or 0 in batch:
        return _reference(logits, tokens, rows, allowed_tokens, mask)
    options = _options(name, rows, vocab_size, block_tokens, block_vocab, (256, 2048), (1, 4096))
    # Imported here: the reference needs no Pallas.
    run = import_module(_MODULES[name].format("logits_logprobs")).run
    results = run(logits.reshape(-1, vocab_size), rows.ids, rows.scale, _allowed(rows, name), options)
    return _shaped(results, tokens.shape, mask, batch)


def linear_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    *,
    bias: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: jax.Array | None = None,
    mask: jax.Array | None = None,
    block_tokens: int | None = None,
    block_vocab: int | None = None,
    workspace: int = WORKSPACE,
    backend: str | None = None,
) -> rl_fn.TokenLogprobs:
    """``logits_logprobs`` of ``hidden @ weight.T + bias`` without the logits, differentiable in all three.

    Args:
        hidden: ``*batch H``.
        weight: ``V H``, of hidden's dtype.
        tokens: token ids, ``*batch``, or ``*batch K`` for K tokens a row.
        bias: ``V``; none by default.
        temperature: > 0, a number or ``*batch``.
        logit_scale: the model's own factor of the logits (Cohere's, Granite's), before the cap.
        softcap: cap before the temperature, or None.
        allowed_tokens: those a truncated sampler may draw, bool ``*batch V`` or ``V``.
        mask: bool ``*batch``; where False the row's results are 0 and it has no gradient, whatever its hidden state.
        block_tokens: rows of logits in a block: on a TPU a multiple of 8 (256 by default), and block_tokens · H and
            block_vocab · H must fit its memory; on a GPU a power of two, at least 16 (128, or 64 in float32), of the
            forward.
        block_vocab: tokens of the vocabulary in a block: on a TPU a multiple of 128 (256), on a GPU a power of two, at
            least 16 (64), of the forward.
        workspace: bytes of the blocks of logits that a GPU's backward makes, however many rows there are.
        backend: "pallas" (on a CPU a TPU's kernels in Pallas's interpreter), "pallas_gpu" (a GPU's, on a CPU in the
            interpreter) or "reference" (rl_fn through XLA, tile by tile). None is "pallas" on a TPU and "reference"
            elsewhere: the kernels for GPUs have not run on a GPU yet, and run on request only.

    Returns:
        ``rl_fn.TokenLogprobs``: logprobs shaped as tokens, entropy and logsumexp ``*batch``.

    Raises:
        ValueError: shapes that do not fit, a temperature (as a number), scale, softcap or workspace that is not
            positive, blocks that are no power of two for a GPU's kernels.
        NotImplementedError: a backend that does not exist or has no kernels for this device.

    >>> out = linear_logprobs(jnp.ones((1, 2)), jnp.zeros((4, 2)), jnp.array([3]), backend="pallas")
    >>> print(out.logprobs.round(4))
    [-1.3863]

    """
    batch, hidden_size = hidden.shape[:-1], hidden.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise ValueError(f"weight must be (V, {hidden_size}), got {weight.shape}")
    if not workspace > 0:
        raise ValueError(f"workspace must be a positive number of bytes, got {workspace}")
    rows = _rows(batch, len(weight), tokens, temperature, logit_scale, softcap, allowed_tokens, mask)
    if mask is not None:
        # A masked row may hold NaN, and 0 · NaN would be in the weight's gradient.
        hidden = jnp.where(mask[..., None], hidden, jnp.zeros_like(hidden))
    name = _resolve(backend)
    if name == "reference" or 0 in batch:
        return _linear_reference(hidden, weight, tokens, bias, rows, allowed_tokens, mask)
    # On a GPU the largest blocks with which every option fits into registers
    # (kernels/benchmarks/pallas_ahead_of_time.py).
    large = (64, 64) if hidden.dtype == jnp.float32 else (128, 64)
    options = _options(name, rows, len(weight), block_tokens, block_vocab, (256, 256), large, least=16)
    run = import_module(_MODULES[name].format("linear_logprobs")).run
    # A TPU's kernels always add a bias.
    shift = jnp.zeros(len(weight), jnp.float32) if bias is None and name == "pallas" else bias
    flat, allowed = hidden.reshape(-1, hidden_size), _allowed(rows, name)
    results = run(flat, weight, shift, rows.ids, rows.scale, allowed, options._replace(workspace=workspace))
    return _shaped(results, tokens.shape, mask, batch)


class _Rows(NamedTuple):
    """Ids [N, K]; logit scale over temperature [N], LEFT_OUT where masked; allowed bool [N, V] or None."""

    ids: jax.Array
    scale: jax.Array
    softcap: float | None
    allowed: jax.Array | None
    temperature: float | jax.Array


def _rows(batch, vocab_size, tokens, temperature, logit_scale, softcap, allowed_tokens, mask):
    if tokens.shape != batch and tokens.shape[:-1] != batch:
        raise ValueError(f"tokens must have shape {batch}, with or without a last axis of K tokens, got {tokens.shape}")
    for name, value in (("temperature", temperature), ("logit_scale", logit_scale), ("softcap", softcap)):
        if isinstance(value, float | int) and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if mask is not None and (mask.shape != batch or mask.dtype != jnp.bool_):
        raise ValueError(f"mask must be bool {batch}, got {mask.dtype} {mask.shape}")
    # cap·tanh(scale·z/cap) = scale·c·tanh(z/c) with c = cap/scale: backends know one factor only, after the cap.
    cap = None if softcap is None else softcap / logit_scale
    scale = jnp.broadcast_to(logit_scale / jnp.asarray(temperature, jnp.float32), batch)
    if mask is not None:
        scale = jnp.where(mask, scale, LEFT_OUT)
    count = scale.size
    allowed = (
        None
        if allowed_tokens is None
        else jnp.broadcast_to(allowed_tokens, (*batch, vocab_size)).reshape(count, vocab_size)
    )
    ids = tokens.reshape(count, 1 if tokens.shape == batch else tokens.shape[-1]).astype(jnp.int32)
    if not ids.shape[1]:
        # With K = 0 there is an entropy still: the kernels get one token, whose log-probability is dropped.
        ids = jnp.zeros((count, 1), jnp.int32)
    return _Rows(ids, scale.reshape(count), cap, allowed, temperature / logit_scale)


def _allowed(rows, name):
    """The mask of allowed tokens as the kernels read it: for a TPU, one byte a token."""
    return rows.allowed.astype(jnp.int8) if rows.allowed is not None and name == "pallas" else rows.allowed


def _shaped(results: Any, tokens: tuple[int, ...], mask: Any, batch: tuple[int, ...]) -> rl_fn.TokenLogprobs:
    logprobs, entropy, logsumexp = results
    width = 1 if tokens == batch else tokens[-1]
    out = rl_fn.TokenLogprobs(logprobs[:, :width].reshape(tokens), entropy.reshape(batch), logsumexp.reshape(batch))
    return _counted(out, mask)


def _counted(out, mask):
    """Results 0 where a row does not count."""
    if mask is None:
        return out
    wide = mask.reshape(mask.shape + (1,) * (out.logprobs.ndim - mask.ndim))
    return rl_fn.TokenLogprobs(
        jnp.where(wide, out.logprobs, 0.0), jnp.where(mask, out.entropy, 0.0), jnp.where(mask, out.logsumexp, 0.0)
    )


def _resolve(backend: str | None) -> str:
    """The backend that runs."""
    device = jax.default_backend()
    if backend is None:
        return "pallas" if device == "tpu" else "reference"
    if backend not in BACKENDS:
        raise NotImplementedError(f"no backend {backend!r} for JAX arrays; available: {', '.join(BACKENDS)}")
    if backend == "pallas_gpu" and device not in ("cpu", "gpu"):
        raise NotImplementedError(f"backend 'pallas_gpu' has kernels for GPUs only, not for {device}")
    if backend == "pallas" and device not in _PALLAS:
        raise NotImplementedError(f"backend 'pallas' has kernels for TPU and GPU, not for {device}")
    return _PALLAS[device] if backend == "pallas" else backend


def _options(name, rows, vocab_size, block_tokens, block_vocab, tpu, gpu, least=1):
    interpret = jax.default_backend() == "cpu"
    allowed = rows.allowed is not None
    sizes = max(len(rows.ids), 1), max(vocab_size, 1)
    defaults = tpu if name == "pallas" else gpu
    blocks = [d if b is None else b for b, d in zip((block_tokens, block_vocab), defaults, strict=True)]
    if name == "pallas":
        fitting = [min(b, -(-size // unit) * unit) for b, size, unit in zip(blocks, sizes, (8, 128), strict=True)]
    else:
        for argument, b in zip(("block_tokens", "block_vocab"), blocks, strict=True):
            if b < least or b & (b - 1):
                raise ValueError(f"{argument} must be a power of two, at least {least}, for a GPU's kernels, got {b}")
        fitting = [max(least, min(b, 1 << (size - 1).bit_length())) for b, size in zip(blocks, sizes, strict=True)]
    return Options(vocab_size, rows.softcap, allowed, fitting[0], fitting[1], interpret)


def _reference(logits, tokens, rows, allowed_tokens, mask):
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, jnp.zeros_like(logits))

    def one(ids):
        return rl_fn.logits_logprobs(
            logits, ids, temperature=rows.temperature, softcap=rows.softcap, allowed_tokens=allowed_tokens
        )

    return _counted(_each(one, logits.shape[:-1], tokens), mask)


def _linear_reference(hidden, weight, tokens, bias, rows, allowed_tokens, mask):
    batch = hidden.shape[:-1]
    if allowed_tokens is not None and allowed_tokens.ndim > 1:
        wide = matmul(hidden.astype(jnp.float32), weight.astype(jnp.float32), (hidden.ndim - 1, 1))
        shift = 0.0 if bias is None else bias.astype(jnp.float32).reshape((1,) * len(batch) + bias.shape)
        return _reference(wide + shift, tokens, rows, allowed_tokens, mask)

    def one(ids):
        return rl_fn.linear_logprobs(
            hidden,
            weight,
            ids,
            bias=bias,
            temperature=rows.temperature,
            softcap=rows.softcap,
            allowed_tokens=allowed_tokens,
        )

    return _counted(_each(one, batch, tokens), mask)


def _each(one, batch, tokens):
    """K tokens a row: the log-probability of each, and entropy and logsumexp once."""
    if tokens.shape == batch:
        return one(tokens)
    results = [one(tokens[..., k]) for k in range(tokens.shape[-1])]
    row = results[0] if results else one(jnp.zeros(batch, jnp.int32))
    logprobs = jnp.stack([r.logprobs for r in results], -1) if results else jnp.zeros((*batch, 0), jnp.float32)
    return rl_fn.TokenLogprobs(logprobs, row.entropy, row.logsumexp)
