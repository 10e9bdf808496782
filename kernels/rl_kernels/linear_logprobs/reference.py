"""rl_fn's formula, run by XLA: the definition that other backends are compared with. It holds every row's logits."""

import jax
import jax.numpy as jnp
from torch import Tensor

import rl_fn
from rl_kernels.common.arguments import Problem
from rl_kernels.common.row_state import RowState
from rl_kernels.linear_logprobs.backward import Gradients, Needed, Results
from rl_kernels.logits_logprobs.reference import allowed_mask, as_array, as_tensor, masked, token_results


def forward(problem: Problem, workspace: int) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state."""
    hidden, weight, bias, rows, start = problem
    ids, temperature, allowed, counted = _arguments(problem)

    def states(h, w, b):
        x = _logits(h, w, b)
        possible = None if allowed is None else allowed[:, start:]
        if counted is not None:
            everywhere = jnp.broadcast_to(counted[:, None], x.shape)
            possible = everywhere if possible is None else possible & everywhere
        # −1 is no token: K may be 0, and a row without a target has a state too.
        columns = [jnp.full(len(hidden), -1, ids.dtype), *(ids[:, k] for k in range(ids.shape[1]))]
        return [
            rl_fn.row_state(x, c, start=start, temperature=temperature, softcap=rows.softcap, allowed_tokens=possible)
            for c in columns
        ]

    row, *each = jax.jit(states)(*_arrays(hidden, weight, bias))
    target = jnp.stack([state.target for state in each], 1) if each else jnp.zeros((len(hidden), 0))
    return RowState(*(as_tensor(field, hidden.device) for field in (*row[:3], target)))


def backward(problem: Problem, workspace: int, outputs: Results, cotangents: Results, needed: Needed) -> Gradients:
    """dL/dhidden, dL/dweight, dL/dbias by jax.vjp, of a whole vocabulary."""
    hidden, weight, bias, rows, _ = problem
    whole = _arrays(hidden, weight, bias)
    asked = [
        number for number, (array, wish) in enumerate(zip(whole, needed, strict=True)) if wish and array is not None
    ]
    ids, temperature, allowed, counted = _arguments(problem)

    def values(*some):
        h, w, b = (some[asked.index(n)] if n in asked else array for n, array in enumerate(whole))
        x = _logits(h if counted is None else jnp.where(counted[:, None], h, 0.0), w, b)  # pyright: ignore[reportArgumentType]
        return masked(token_results(x, ids, temperature, rows.softcap, allowed), counted)

    def pulled(arrays, c):
        return jax.vjp(values, *arrays)[1](c)

    pulled_back = jax.jit(pulled)(tuple(whole[n] for n in asked), tuple(as_array(c) for c in cotangents))
    found: list[Tensor | None] = [None, None, None]
    for n, gradient in zip(asked, pulled_back, strict=True):
        like = (hidden, weight, bias)[n]
        assert like is not None
        found[n] = as_tensor(gradient, hidden.device).to(like.dtype)
    return found[0], found[1], found[2]


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> jax.Array:
    """hidden @ weight.T + bias in float32."""
    return _logits(*_arrays(hidden, weight, bias))


def _arguments(problem: Problem):
    """Token ids, temperature, allowed tokens or None, and the mask or None, as JAX arrays."""
    _, weight, _, rows, start = problem
    ids, temperature = jnp.asarray(rows.tokens.cpu().numpy()), 1.0 / as_array(rows.inv_temperature)
    allowed = None if rows.allowed_tokens is None else allowed_mask(rows.allowed_tokens, start + len(weight))
    return ids, temperature, allowed, None if rows.mask is None else jnp.asarray(rows.mask.cpu().numpy())


def _logits(h, w, b):
    x = jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return x if b is None else x + b[None, :]


def _arrays(hidden, weight, bias):
    return as_array(hidden), as_array(weight), None if bias is None else as_array(bias)
