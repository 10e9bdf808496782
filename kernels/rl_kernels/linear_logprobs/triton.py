"""Triton for NVIDIA and ROCm: one kernel forward, whose logits are never in memory; backward, a block's logits by a
matrix product, one fused pass to their gradient, two products.

A row's result does not depend on the other rows: the parts of the vocabulary whose states are merged depend on its size
alone.
"""

from functools import partial

import torch
import triton
from torch import Tensor

from rl_kernels.linear_logprobs.backward import backward as in_blocks
from rl_kernels.linear_logprobs.configurations import architecture, configuration
from rl_kernels.linear_logprobs.forward import GROUP
from rl_kernels.linear_logprobs.forward import forward as in_parts
from rl_kernels.linear_logprobs.kernels import dlogits_kernel, forward_kernel
from rl_kernels.row_state import RowState

# Entries whose gradient a program computes: as many as its registers hold.
BLOCK = 1024


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
    vocabulary, features = weight.shape
    width = inverse.element_size() if hidden.dtype != weight.dtype else hidden.element_size()
    tile = configuration(architecture(hidden.device), width, features, vocabulary)

    def launch(rows: slice | Tensor, kept: Tensor | None, states: Tensor, targets: Tensor, part: int) -> None:
        index = torch.arange(rows.start, rows.stop, device=hidden.device) if isinstance(rows, slice) else rows
        forward_kernel[(triton.cdiv(len(index), tile.rows) * len(states),)](
            hidden,
            weight,
            inverse if bias is None else bias,
            index,
            tokens,
            inverse,
            inverse if kept is None else kept,
            states,
            targets,
            len(index),
            vocabulary,
            features,
            part,
            tokens.shape[1],
            start,
            hidden.stride(0),
            hidden.stride(1),
            weight.stride(0),
            weight.stride(1),
            0 if bias is None else bias.stride(0),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            BIASED=bias is not None,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            # The interpreter multiplies the bits of bfloat16 as integers.
            WIDENED=hidden.dtype != weight.dtype or not hidden.is_cuda,
            EVEN=features % tile.features == 0,
            GROUP=GROUP,
            ROWS=tile.rows,
            ENTRIES=tile.entries,
            FEATURES=tile.features,
            num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
            num_stages=tile.stages,  # pyright: ignore[reportCallIssue]
        )

    return in_parts(hidden, weight, tokens, inverse, allowed_tokens, mask, start, workspace, launch)


def _dlogits(logits, kept, bias, local, own, inverse, coefficients, base, softcap, dtype):
    count, entries = logits.shape
    gradient = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    block = min(BLOCK, triton.next_power_of_2(entries))
    dlogits_kernel[(count, triton.cdiv(entries, block))](
        logits,
        gradient,
        inverse if kept is None else kept.view(torch.uint8),
        inverse if bias is None else bias,
        local,
        own,
        inverse,
        coefficients.a,
        coefficients.b,
        base,
        entries,
        logits.stride(0),
        gradient.stride(0),
        0 if kept is None else kept.stride(0),
        0 if kept is None else kept.stride(1),
        0 if bias is None else bias.stride(0),
        local.shape[1],
        softcap or 1.0,
        BIASED=bias is not None,
        CAPPED=softcap is not None,
        KEPT=kept is not None,
        BLOCK=block,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )
    return gradient


def _specialisation(function, dtype, target, *, everything, mixed=False, ragged=False):
    """What kernels/benchmarks/ahead_of_time.py compiles: the plain kernel, or the one with every option."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    numbers = dict.fromkeys(("inverse", "states", "targets", "logits", "own", "a", "b", "base"), f"*{wide}")
    pointers = numbers | {"hidden": "*bf16" if mixed else f"*{dtype}", "weight": f"*{dtype}", "gradient": f"*{dtype}"}
    pointers |= {"rows": "*i64", "tokens": "*i64"}
    packed_sets = "*i32" if function is forward_kernel else "*u8"
    pointers |= {"bias": f"*{dtype}", "kept": packed_sets} if everything else {"bias": "*fp32", "kept": "*fp32"}
    options = {"BIASED": everything, "CAPPED": everything, "KEPT": everything}
    tile = configuration(target, {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[dtype], 4097 if ragged else 4096, 128256)
    if function is forward_kernel:
        constants = options | {"WIDENED": mixed, "EVEN": not ragged, "GROUP": GROUP, "ROWS": tile.rows}
        constants |= {"ENTRIES": tile.entries, "FEATURES": tile.features, "hidden_stride": 1, "weight_stride": 1}
        how = {"matrix": dtype not in ("fp32", "fp64"), "warps": tile.warps, "stages": tile.stages}
    else:
        constants, how = options | {"BLOCK": BLOCK}, {}
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in function.arg_names if n not in constants}
    strides = ("hidden_row_stride", "weight_row_stride", "row_stride", "gradient_row_stride", "features", "part_size")
    aligned = tuple(n for n in types if n in pointers or (n in strides and not ragged))
    return function.__name__, types, constants, how | {"aligned": aligned, "targets": (target,)}


_PLAIN, _EVERY = {"everything": False}, {"everything": True}
_VARIANTS = (
    (forward_kernel, "forward bf16", "bf16", _PLAIN),
    (forward_kernel, "forward bf16, every option", "bf16", _EVERY),
    (forward_kernel, "forward bf16, every option, ragged features", "bf16", _EVERY | {"ragged": True}),
    (forward_kernel, "forward fp32", "fp32", _PLAIN),
    (forward_kernel, "forward fp32, every option", "fp32", _EVERY),
    (forward_kernel, "forward bf16 by fp32, every option", "fp32", _EVERY | {"mixed": True, "ragged": True}),
    (forward_kernel, "forward fp64, every option", "fp64", _EVERY | {"ragged": True}),
    (dlogits_kernel, "dlogits bf16", "bf16", _PLAIN),
    (dlogits_kernel, "dlogits fp32, every option", "fp32", _EVERY),
)

SPECIALISATIONS = {
    f"{name} ({target})": _specialisation(function, dtype, target, **options)
    for function, name, dtype, options in _VARIANTS
    for target in ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950")
}


# The loop over blocks is every backend's; a logit becomes its gradient where it lies.
backward = partial(in_blocks, dlogits=_dlogits, numbers=1)
