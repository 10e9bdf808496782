"""rl_fn's formula, run by XLA: the answer every other backend is compared with. It holds every row's logits."""

import jax
import jax.numpy as jnp
from torch import Tensor

import rl_fn
from rl_kernels.common.row_state import RowState
from rl_kernels.logits_logprobs.reference import as_array, as_tensor, kept_set


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out."""
    ids, temperature = jnp.asarray(tokens.cpu().numpy()), 1.0 / as_array(inverse)
    kept = None if allowed_tokens is None else kept_set(allowed_tokens, start + len(weight))[:, start:]
    counted = None if mask is None else jnp.asarray(mask.cpu().numpy())

    def states(h, w, b):
        x = _logits(h, w, b)
        allowed = None if kept is None else kept
        if counted is not None:
            everywhere = jnp.broadcast_to(counted[:, None], x.shape)
            allowed = everywhere if allowed is None else allowed & everywhere
        # Column 0 is no token: a row without targets has a state too.
        columns = [jnp.full(len(hidden), -1, ids.dtype), *(ids[:, k] for k in range(ids.shape[1]))]
        return [
            rl_fn.row_state(x, c, start=start, temperature=temperature, softcap=softcap, allowed_tokens=allowed)
            for c in columns
        ]

    row, *each = jax.jit(states)(*_arrays(hidden, weight, bias))
    target = jnp.stack([state.target for state in each], 1) if each else jnp.zeros((len(hidden), 0))
    return RowState(*(as_tensor(field, hidden.device) for field in (*row[:3], target)))


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
    outputs: tuple[Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dL/dhidden, dL/dweight, dL/dbias by jax.vjp, of a vocabulary that is whole (the operation refuses shards)."""
    ids, temperature = jnp.asarray(tokens.cpu().numpy()), 1.0 / as_array(inverse)
    kept = None if allowed_tokens is None else kept_set(allowed_tokens, len(weight))
    counted = None if mask is None else jnp.asarray(mask.cpu().numpy())

    def values(h, w, b):
        x = _logits(h if counted is None else jnp.where(counted[:, None], h, 0.0), w, b)
        row = rl_fn.logits_logprobs(
            x, jnp.zeros(len(hidden), ids.dtype), temperature=temperature, softcap=softcap, allowed_tokens=kept
        )
        each = [
            rl_fn.logits_logprobs(x, ids[:, k], temperature=temperature, softcap=softcap, allowed_tokens=kept).logprobs
            for k in range(ids.shape[1])
        ]
        logprobs = jnp.stack(each, 1) if each else jnp.zeros((len(hidden), 0), x.dtype)
        result = (logprobs, row.entropy, row.logsumexp)
        if counted is None:
            return result
        return tuple(jnp.where(counted.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0) for v in result)

    def pulled(arrays, c):
        return jax.vjp(values, *arrays)[1](c)

    gradients = jax.jit(pulled)(_arrays(hidden, weight, bias), tuple(as_array(c) for c in cotangents))
    d_hidden, d_weight, d_bias = (None if x is None else as_tensor(x, hidden.device) for x in gradients)
    assert d_hidden is not None and d_weight is not None
    return (
        d_hidden.to(hidden.dtype),
        d_weight.to(weight.dtype),
        None if bias is None or d_bias is None else d_bias.to(bias.dtype),
    )


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> jax.Array:
    """hidden @ weight.T + bias in float32."""
    return _logits(*_arrays(hidden, weight, bias))


def _logits(h, w, b):
    x = jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return x if b is None else x + b[None, :]


def _arrays(hidden, weight, bias):
    return as_array(hidden), as_array(weight), None if bias is None else as_array(bias)
