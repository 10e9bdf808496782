"""Gluon for Hopper (sm_90), for those who ask: Triton's algebra and backward, with the forward's tiles copied by TMA
into a ring of shared buffers and multiplied by warpgroups (wgmma), while the next are on their way.

Never run on a GPU. What is known: it compiles with Triton 3.9 and 3.6 without spills; its source, run program by
program in an emulator (tests/kernels/gluon_emulator.py), gives what float64 gives, and no buffer is read before it has
arrived or overwritten before it was read, in the order that the source says. So indices, masks, phases and algebra are
shown; the hardware's own synchronisation, fences and layouts are not, nor its speed.
"""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernels.linear_logprobs import triton as portable
from rl_kernels.linear_logprobs.blocks import row_blocks
from rl_kernels.linear_logprobs.configurations import part_of
from rl_kernels.linear_logprobs.gluon_kernels import forward_kernel
from rl_kernels.row_state import RowState, empty_state, merge_all
from rl_kernels.support import packed

# A tile: 192 KiB of shared buffers in four stages, 128 registers a thread of 256 for its logits. None was timed.
ROWS, ENTRIES, FEATURES, STAGES, WARPS = 128, 256, 64, 4, 8
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# What TMA asks of an address and of the distance between rows, in bytes.
ALIGNMENT = 16

backward = portable.backward


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    support: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out."""
    lacking = _lacking(hidden, weight)
    if lacking:
        raise NotImplementedError(
            f"linear_logprobs: backend 'gluon' has no {', '.join(lacking)}; backends that have: triton, torch"
        )
    result = empty_state(inverse, tokens)
    vocabulary, features = weight.shape
    if vocabulary == 0:
        return result
    part = part_of(vocabulary)
    parts = triton.cdiv(vocabulary, part)
    entries = _described(weight, ENTRIES)
    # TMA reads rows that lie at equal distances: those that count are copied when some do not.
    copied = 0 if mask is None and _fits(hidden) else hidden.element_size() * _padded(features)
    at_once = portable.rows_at_once(vocabulary, parts, tokens.shape[1], support, workspace, copied)
    for rows in row_blocks(len(hidden), mask, at_once):
        here = _readable(hidden[rows])
        count = len(here)
        if count == 0:
            continue
        kept = None if support is None else packed(portable.local_ids(support[rows], start), vocabulary)
        states = inverse.new_empty(parts, 3, count)
        targets = inverse.new_full((count, tokens.shape[1]), float("-inf"))
        scale = inverse[rows]
        forward_kernel[(triton.cdiv(count, ROWS) * parts,)](
            _described(here, ROWS),
            entries,
            scale if bias is None else bias,
            tokens[rows],
            scale,
            scale if kept is None else kept,
            states,
            targets,
            count,
            vocabulary,
            features,
            part,
            tokens.shape[1],
            start,
            0 if bias is None else bias.stride(0),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            BIASED=bias is not None,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            GROUP=portable.GROUP,
            STAGES=STAGES,
            num_warps=WARPS,  # pyright: ignore[reportCallIssue]
        )
        merged = merge_all([RowState(s[0], s[1], s[2], targets) for s in states])
        for field, value in zip(result, merged, strict=True):
            field[rows] = value
    return result


def _lacking(hidden: Tensor, weight: Tensor) -> list[str]:
    found = []
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"{hidden.dtype} by {weight.dtype} (both bfloat16, or both float16)")
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) != (9, 0):
        found.append("kernel for another compute capability than 9.0")
    if weight.shape[1] == 0:
        found.append("product over no features")
    # A copy of the weight would be as large as what this operation is there to avoid.
    if len(weight) and not _fits(weight):
        found.append(
            f"weight with strides {weight.stride()} at this address (rows must be contiguous and begin at multiples of "
            f"{ALIGNMENT} bytes)"
        )
    return found


def _fits(x: Tensor) -> bool:
    """Whether TMA can read these rows where they are."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % ALIGNMENT == 0 == x.data_ptr() % ALIGNMENT


def _padded(features: int) -> int:
    """Elements of a row that ends where the next may begin."""
    return -(-features // (ALIGNMENT // 2)) * (ALIGNMENT // 2)


def _readable(x: Tensor) -> Tensor:
    """These rows, or a copy that TMA can read."""
    return x if _fits(x) else x.new_empty(len(x), _padded(x.shape[1]))[:, : x.shape[1]].copy_(x)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, FEATURES], LAYOUT)


def _specialisation(dtype: str, everything: bool):
    """What kernels/benchmarks/ahead_of_time.py compiles: the plain kernel, or the one with every option."""
    pointers = dict.fromkeys(("inverse", "states", "targets"), "*fp32") | {"tokens": "*i64"}
    pointers |= {"bias": f"*{dtype}", "kept": "*i32"} if everything else {"bias": "*fp32", "kept": "*fp32"}
    described = {
        name: f"tensordesc<{dtype}[{rows},{FEATURES}],{LAYOUT!r}>"
        for name, rows in (("hidden", ROWS), ("weight", ENTRIES))
    }
    constants = dict.fromkeys(("BIASED", "CAPPED", "KEPT"), everything) | {"GROUP": portable.GROUP, "STAGES": STAGES}
    known = pointers | described | {"softcap": "fp32"}
    types = {name: known.get(name, "i32") for name in forward_kernel.arg_names if name not in constants}
    how = {"matrix": True, "bulk": True, "warps": WARPS, "aligned": (*pointers, "part_size"), "targets": ("sm_90",)}
    return forward_kernel.__name__, types, constants, how


SPECIALISATIONS = {
    f"gluon forward {dtype}{', every option' if everything else ''} (sm_90)": _specialisation(dtype, everything)
    for dtype, everything in (("bf16", False), ("bf16", True), ("fp16", True))
}
