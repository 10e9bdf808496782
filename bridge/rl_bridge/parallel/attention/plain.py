"""Attention with sinks or a soft cap where no plan holds rows apart: padded rows, and tokens that come after a cache.

SDPA has neither, and drops them without a word.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.sinks import sinks_gradient, with_sinks


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[N, H, Tq, Dv] of q [N, H, Tq, D], k [N, H / G, Tk, D] and v [N, H / G, Tk, Dv].

    A query that sees nothing has output 0. The mask has no gradient. mask: broadcast to [N, H, Tq, Tk]. sinks: [H].
    """
    with torch.autocast(q.device.type, enabled=False):
        options = {"causal": causal, "scale": scale, "softcap": softcap, "mask": mask}
        return _Attention.apply(q, k, v, sinks, options)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        of_heads: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        out, lse = blocks.forward(q, k, v, **options)
        if of_heads is not None:
            out, lse = with_sinks(out, lse, of_heads[:, None])
        ctx.save_for_backward(q, k, v, out, lse, of_heads)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, of_heads = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = blocks.backward(grad, q, k, v, out, lse, **ctx.options)
            dsinks = None if of_heads is None else sinks_gradient(grad, out, lse, of_heads[:, None])[:, 0]
        return dq, dk, dv, dsinks, None
