"""Attention of one block with its logsumexp, partial attentions as one, sinks, and the backward pass of all blocks.

The backward operation of flash attention computes exp(score − logsumexp) again. With the output and the logsumexp of
the whole row, not of the block, its results are the block's part of the exact gradients, and parts are simply added.

A sink is one more logit in the logsumexp. With the logsumexp of keys and sink, and the output made smaller by the
part of the sink, the backward pass of the keys' blocks is what it is without sinks.

SDPA has neither sinks nor soft caps, and drops them without a word.
"""

import functools
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from rl_bridge.parallel.attention import exact

# Attention of one block, with its logsumexp, and a backward pass that is given the logsumexp of all blocks.

Operation = Literal["cpu_flash", "cuda_flash", "cuda_efficient", "math"]
OPS: Any = torch.ops.aten


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether a GPU has what flash attention needs (NVIDIA: Ampere or later)."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def operation(q: torch.Tensor, v: torch.Tensor) -> Operation:
    """The operation that computes blocks of such tensors. ``math`` takes anything: ``exact`` computes it."""
    if q.shape[-1] != v.shape[-1]:
        return "math"
    if q.device.type == "cpu":
        return "cpu_flash"
    # The CUDA operations read vectors of 16 bytes. Flash attention has no float32.
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0:
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256 and has_flash(q.device):
            return "cuda_flash"
        if q.dtype in (torch.float16, torch.bfloat16, torch.float32):
            return "cuda_efficient"
    return "math"


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its logsumexp, [B, H, Lq, D] and [B, H, Lq] (float32, or float64 for float64).

    q: [B, H, Lq, D]. k, v: [B, H / G, Lk, D]; G queries heads share a head of keys. No length is 0: the operations end
    the process there. ``causal`` is for squares. ``softcap`` and ``mask``: of ``exact.forward``.
    """
    assert q.shape[2] > 0 and k.shape[2] > 0 and (not causal or q.shape[2] == k.shape[2]), (q.shape, k.shape, causal)
    match _operation(q, v, softcap, mask):
        case "cpu_flash":
            return OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        case "cuda_flash":
            return OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        case "cuda_efficient":
            k, v = _repeated(k, q), _repeated(v, q)
            out, lse, *_ = OPS._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return out, lse[:, :, : q.shape[2]]
        case "math":
            return exact.forward(q, k, v, causal=causal, scale=scale, softcap=softcap, mask=mask)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's part of the gradients of q, k and v, where out and lse are those of all of the queries' blocks.

    grad, q, out: [B, H, Lq, D]. k, v: [B, H / G, Lk, D]. lse: [B, H, Lq].
    """
    match _operation(q, v, softcap, mask):
        case "cpu_flash":
            op = OPS._scaled_dot_product_flash_attention_for_cpu_backward
            return op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        case "cuda_flash":
            op = OPS._scaled_dot_product_flash_attention_backward
            # Without dropout the random state is not read; without packing there are no cumulative lengths.
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            none = torch.zeros((), dtype=torch.uint64, device=q.device)
            sizes = (None, None, q.shape[2], k.shape[2])
            return op(grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, state, none, scale=scale)
        case "cuda_efficient":
            op = OPS._scaled_dot_product_efficient_attention_backward
            zero = torch.zeros((), dtype=torch.int64, device=q.device)
            # The kernel reads whole tiles of 32 queries: beyond the last, exp(score − inf) is 0.
            tiles = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
            gradient_mask = [True, True, True, False]
            wide = (_repeated(k, q), _repeated(v, q))
            dq, dk, dv, _ = op(grad, q, *wide, None, out, tiles, zero, zero, 0.0, gradient_mask, causal, scale=scale)
            return dq, _summed(dk, k), _summed(dv, v)
        case "math":
            options = {"causal": causal, "scale": scale, "softcap": softcap, "mask": mask}
            return exact.backward(grad, q, k, v, out, lse, **options)


def _operation(q: torch.Tensor, v: torch.Tensor, softcap: float | None, mask: torch.Tensor | None) -> Operation:
    return operation(q, v) if softcap is None and mask is None else "math"


def _repeated(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _summed(grad: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Gradients of repeated heads, summed over the repeats."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)


# Two partial attentions of the same queries, over disjoint keys, as one.


def merge_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Take a block's keys into ``out`` and ``lse``, in place.

    With w = sigmoid(block_lse − lse), the block's part of the softmax, out becomes (1 − w) · out + w · block_out. Every
    query has at least one key on both sides, so both logsumexps are finite.

    out, block_out: [T, H, D]. lse, block_lse: [T, H]. ``out`` and ``lse`` have the dtype to sum in.
    """
    weight = torch.sigmoid(block_lse - lse)[..., None].to(out.dtype)
    out.lerp_(block_out.to(out.dtype), weight)
    torch.logaddexp(lse, block_lse, out=lse)


# Attention sinks: a learned logit of each head that takes a part of the probability and has no value.


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp with the sinks, from those of the keys alone.

    out: [*, D]. lse: [*]. sinks: broadcast to [*].
    """
    sinks = sinks.to(lse.dtype)
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def sinks_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks, where out and lse are what ``with_sinks`` gave and grad is the gradient of out."""
    part = torch.exp(sinks.to(lse.dtype) - lse)
    return -(part * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)


# Attention with sinks or a soft cap where no plan holds rows apart: padded rows, and tokens that come after a cache.


def plain_attention(
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
        out, lse = forward(q, k, v, **options)
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
            dq, dk, dv = backward(grad, q, k, v, out, lse, **ctx.options)
            dsinks = None if of_heads is None else sinks_gradient(grad, out, lse, of_heads[:, None])[:, 0]
        return dq, dk, dv, dsinks, None
