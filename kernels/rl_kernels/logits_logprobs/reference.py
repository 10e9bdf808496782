"""rl_fn's formula, run by XLA: the answer every other backend is compared with. It holds every row at once."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn


def forward(
    logits: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    function = _function(tokens, inverse, softcap, allowed_tokens, mask, logits.shape[-1])
    return tuple(as_tensor(value, logits.device) for value in jax.jit(function)(as_array(logits)))  # pyright: ignore[reportReturnType]


def backward(
    logits: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
) -> None:
    """Write dL/dlogits into ``gradient``, which may be the logits' own memory."""
    function = _function(tokens, inverse, softcap, allowed_tokens, mask, logits.shape[-1])

    def pulled(x, c):
        return jax.vjp(function, x)[1](c)[0]

    result = jax.jit(pulled)(as_array(logits), tuple(as_array(c) for c in cotangents))
    gradient.copy_(as_tensor(result, logits.device))


def _function(tokens, inverse, softcap, allowed_tokens, mask, vocabulary):
    ids, temperature = jnp.asarray(tokens.cpu().numpy()), 1.0 / as_array(inverse)
    kept = None if allowed_tokens is None else kept_set(allowed_tokens, vocabulary)
    counted = None if mask is None else jnp.asarray(mask.cpu().numpy())

    def function(x):
        if counted is not None:
            x = jnp.where(counted[:, None], x, 0.0)
        each = [
            rl_fn.logits_logprobs(x, ids[:, k], temperature=temperature, softcap=softcap, allowed_tokens=kept)
            for k in range(ids.shape[1])
        ]
        # Without a target there is still an entropy.
        row = rl_fn.logits_logprobs(
            x, jnp.zeros(x.shape[0], jnp.int32), temperature=temperature, softcap=softcap, allowed_tokens=kept
        )
        logprobs = jnp.stack([e.logprobs for e in each], 1) if each else jnp.zeros((x.shape[0], 0), row.entropy.dtype)
        values = (logprobs, row.entropy, row.logsumexp)
        if counted is None:
            return values
        return tuple(jnp.where(counted.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0) for v in values)

    return function


def kept_set(allowed_tokens: Tensor, vocabulary: int) -> jax.Array:
    if allowed_tokens.dtype == torch.bool:
        return jnp.asarray(allowed_tokens.cpu().numpy())
    ids = allowed_tokens.cpu().numpy()
    kept = np.zeros((len(ids), vocabulary + 1), bool)
    np.put_along_axis(kept, np.where(ids < 0, vocabulary, ids), True, 1)
    return jnp.asarray(kept[:, :vocabulary])


def as_array(x: Tensor) -> jax.Array:
    return jnp.asarray(x.detach().float().cpu().numpy())


def as_tensor(x: jax.Array, device: torch.device) -> Tensor:
    return torch.tensor(np.array(x), device=device)
