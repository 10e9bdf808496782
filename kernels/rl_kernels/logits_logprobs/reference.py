"""rl_fn's formula, run by XLA: the definition that every other backend is compared with. It holds every row at once."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn
from rl_kernels.common.arguments import Rows

Results = tuple[Tensor, Tensor, Tensor]


def forward(logits: Tensor, rows: Rows) -> Results:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    values = jax.jit(_function(rows, logits.shape[-1]))(as_array(logits))
    return tuple(as_tensor(value, logits.device) for value in values)  # pyright: ignore[reportReturnType]


def backward(logits: Tensor, rows: Rows, outputs: Results, cotangents: Results, gradient: Tensor) -> None:
    """Write dL/dlogits into ``gradient``, which may be the logits' own memory."""
    function = _function(rows, logits.shape[-1])

    def pulled(x, c):
        return jax.vjp(function, x)[1](c)[0]

    result = jax.jit(pulled)(as_array(logits), tuple(as_array(c) for c in cotangents))
    gradient.copy_(as_tensor(result, logits.device))


def _function(rows: Rows, vocab_size: int):
    ids, temperature = jnp.asarray(rows.tokens.cpu().numpy()), 1.0 / as_array(rows.inv_temperature)
    allowed = None if rows.allowed_tokens is None else allowed_mask(rows.allowed_tokens, vocab_size)
    counted = None if rows.mask is None else jnp.asarray(rows.mask.cpu().numpy())

    def function(x):
        if counted is not None:
            x = jnp.where(counted[:, None], x, 0.0)
        return masked(token_results(x, ids, temperature, rows.softcap, allowed), counted)

    return function


def token_results(x, ids, temperature, softcap, allowed):
    """Log-probabilities [N, K], entropy [N] and logsumexp [N] of logits x [N, V]."""

    def one(tokens):
        return rl_fn.logits_logprobs(x, tokens, temperature=temperature, softcap=softcap, allowed_tokens=allowed)

    each = [one(ids[:, k]).logprobs for k in range(ids.shape[1])]
    # K may be 0: a row without a target has an entropy too.
    row = one(jnp.zeros(x.shape[0], ids.dtype))
    logprobs = jnp.stack(each, 1) if each else jnp.zeros((x.shape[0], 0), row.entropy.dtype)
    return logprobs, row.entropy, row.logsumexp


def masked(values, counted):
    """0 in rows that do not count."""
    if counted is None:
        return values
    return tuple(jnp.where(counted.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0) for v in values)


def allowed_mask(allowed_tokens: Tensor, vocab_size: int) -> jax.Array:
    """bool [N, V] of either form."""
    if allowed_tokens.dtype == torch.bool:
        return jnp.asarray(allowed_tokens.cpu().numpy())
    ids = allowed_tokens.cpu().numpy()
    allowed = np.zeros((len(ids), vocab_size + 1), bool)
    np.put_along_axis(allowed, np.where(ids < 0, vocab_size, ids), True, 1)
    return jnp.asarray(allowed[:, :vocab_size])


def as_array(x: Tensor) -> jax.Array:
    return jnp.asarray(x.detach().float().cpu().numpy())


def as_tensor(x: jax.Array, device: torch.device) -> Tensor:
    return torch.tensor(np.array(x), device=device)
