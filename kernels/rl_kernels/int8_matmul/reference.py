"""rl_fn's codes and XLA's int32 matmul: the definition that other backends are compared with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn


def forward(
    x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, half_range: float, y: Tensor
) -> None:
    """Write the result into ``y`` [M, N]."""
    arrays = [jnp.asarray(t.float().cpu().numpy()) for t in (x, weight_scale, y.new_zeros(1) if bias is None else bias)]
    total = _matmul(arrays[0], jnp.asarray(weight_q.cpu().numpy()), *arrays[1:], half_range=half_range)
    y.copy_(torch.from_numpy(np.array(total)))


@partial(jax.jit, static_argnames="half_range")
def _matmul(x, weight_q, weight_scale, bias, *, half_range):
    codes, scale = rl_fn.quantize_int8(x, half_range=half_range)
    total = jax.lax.dot_general(codes, weight_q, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    factor = jnp.broadcast_to(scale, total.shape) * jnp.broadcast_to(weight_scale, total.shape)
    return total.astype(jnp.float32) * factor + jnp.broadcast_to(bias, total.shape)
