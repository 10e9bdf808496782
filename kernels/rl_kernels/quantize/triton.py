"""Triton for NVIDIA and ROCm: a list of weights in a few launches, each weight read from memory once.

A program has some rows, or a block, in registers: it finds the largest magnitudes and writes codes and scales. Rows
wider than a tile are read twice, the second time from cache; a scale for a whole tensor takes two sweeps of it.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernels.quantize.kernel_math import fp8_codes, int8_codes, magnitude_bits, scale_of
from rl_kernels.quantize.scheme import Scheme
from rl_kernels.quantize.table import WIDTHS, Group, Matrix, groups, tile_height

_LARGEST_BLOCK = 128
# Rows of a block at a time where it is not aligned.
_PIECE = 32
_FIELDS = tl.constexpr(len(Matrix._fields))
_FIRST = tl.constexpr(Matrix._fields.index("first"))


@triton.jit
def entry_of(table, entries, program):
    """The last row of the table whose first program is not beyond this one."""
    low = tl.full([], 0, tl.int32)
    high = entries + low
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle * _FIELDS + _FIRST) <= program
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    return low


@triton.jit
def places(address, like, row, column, row_stride, column_stride, ALIGNED: tl.constexpr):
    """Pointers [ROWS, COLUMNS]; where everything is aligned, said so that vectors are read and written."""
    pointer = address.to(like.dtype)
    if ALIGNED:
        place = pointer + (row[:, None] * row_stride + column[None, :])
        place = tl.max_contiguous(tl.multiple_of(place, [16, 16]), [1, 16])
    else:
        place = pointer + (row[:, None] * row_stride + column[None, :] * column_stride)
    return place


@triton.jit
def absmax_kernel(
    table, weight_like, absmax, entries, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest magnitude of each tensor, as its bits: their order is that of the numbers, so that none is lost."""
    program = tl.program_id(0)
    field = table + entry_of(table, entries, program) * _FIELDS
    columns, row_stride = tl.load(field + 4), tl.load(field + 5)
    if ALIGNED:
        columns, row_stride = tl.multiple_of(columns, 16), tl.multiple_of(row_stride, 16)
    local = program - tl.load(field + 9)
    across = tl.load(field + 10)
    row = (local // across) * ROWS + tl.arange(0, ROWS)
    column = (local % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tl.load(field + 3))[:, None] & (column < columns)[None, :]
    place = places(tl.load(field), weight_like, row, column, row_stride, tl.load(field + 6), ALIGNED)
    bits = magnitude_bits(tl.load(place, mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(absmax + tl.load(field + 11), tl.max(tl.max(bits, 1), 0), sem="relaxed")


@triton.jit
def codes_of(x, peak, largest, FP8: tl.constexpr, NATIVE: tl.constexpr, UNSIGNED_ZERO: tl.constexpr):
    scale, finite = scale_of(peak, largest)
    return fp8_codes(x, scale, finite, NATIVE, UNSIGNED_ZERO) if FP8 else int8_codes(x, scale, finite)


@triton.jit
def stored_scale(peak, largest, UNSIGNED_ZERO: tl.constexpr):
    scale, finite = scale_of(peak, largest)
    if UNSIGNED_ZERO:
        scale = scale * 2.0
    return tl.where(finite, scale, float("nan"))


@triton.jit
def read(address, like, row, column, rows, columns, row_stride, column_stride, ALIGNED: tl.constexpr):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = places(address, like, row, column, row_stride, column_stride, ALIGNED)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write(codes, address, like, row, column, rows, columns, row_stride, column_stride, ALIGNED: tl.constexpr):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(places(address, like, row, column, row_stride, column_stride, ALIGNED), codes, mask=inside)


@triton.jit
def quantize_kernel(
    table, weight_like, code_like, absmax, entries, largest,
    GRANULARITY: tl.constexpr, WHOLE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    field = table + entry_of(table, entries, program) * _FIELDS
    weight, out, scales = tl.load(field), tl.load(field + 1), tl.load(field + 2).to(tl.pointer_type(tl.float32))
    rows, columns = tl.load(field + 3), tl.load(field + 4)
    weight_row, weight_column = tl.load(field + 5), tl.load(field + 6)
    out_row, out_column = tl.load(field + 7), tl.load(field + 8)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
        weight_row, out_row = tl.multiple_of(weight_row, 16), tl.multiple_of(out_row, 16)
    local = program - tl.load(field + 9)
    across = tl.load(field + 10)
    if GRANULARITY == "channel":
        top, left = local * ROWS, local * 0
        rows = tl.minimum(rows, top + ROWS)
    elif GRANULARITY == "block":
        top, left = (local // across) * BLOCK, (local % across) * BLOCK
        rows, columns = tl.minimum(rows, top + BLOCK), tl.minimum(columns, left + BLOCK)
    else:
        top, left = (local // across) * ROWS, (local % across) * COLUMNS
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)

    if WHOLE:
        x = read(weight, weight_like, row, column, rows, columns, weight_row, weight_column, ALIGNED)
        if GRANULARITY == "tensor":
            peak = tl.load(absmax + tl.load(field + 11))
        else:
            peak = tl.max(magnitude_bits(x), 1)
            if GRANULARITY == "block":
                peak = tl.max(peak, 0)
        each = peak[:, None] if GRANULARITY == "channel" else peak
        codes = codes_of(x, each, largest, FP8, NATIVE, UNSIGNED_ZERO)
        write(codes, out, code_like, row, column, rows, columns, out_row, out_column, ALIGNED)
    else:
        # Too large to hold: in pieces, downwards in a block and along a row, read twice.
        down = ROWS if GRANULARITY == "block" else 0
        right = 0 if GRANULARITY == "block" else COLUMNS
        steps = tl.cdiv(rows - top, ROWS) if GRANULARITY == "block" else tl.cdiv(columns, COLUMNS)
        peak = tl.zeros([ROWS], tl.int32)
        for step in range(0, steps):
            x = read(
                weight, weight_like, row + step * down, column + step * right, rows, columns, weight_row,
                weight_column, ALIGNED,
            )  # fmt: skip
            peak = tl.maximum(peak, tl.max(magnitude_bits(x), 1))
        if GRANULARITY == "block":
            peak = tl.max(peak, 0)
        each = peak[:, None] if GRANULARITY == "channel" else peak
        for step in range(0, steps):
            i, j = row + step * down, column + step * right
            x = read(weight, weight_like, i, j, rows, columns, weight_row, weight_column, ALIGNED)
            codes = codes_of(x, each, largest, FP8, NATIVE, UNSIGNED_ZERO)
            write(codes, out, code_like, i, j, rows, columns, out_row, out_column, ALIGNED)

    scale = stored_scale(peak, largest, UNSIGNED_ZERO)
    if GRANULARITY == "channel":
        tl.store(scales + row, scale, mask=row < rows)
    elif GRANULARITY == "block":
        tl.store(scales + local, scale)
    else:
        if local == 0:
            tl.store(scales, scale)


def forward(weights: list[Tensor], out: list[Tensor], scales: list[Tensor], scheme: Scheme) -> None:
    """Write codes into ``out`` and scales, shaped as rl_fn's, into ``scales``."""
    if scheme.granularity == "block" and scheme.block > _LARGEST_BLOCK:
        raise NotImplementedError(
            f"quantize: backend 'triton' takes blocks up to {_LARGEST_BLOCK}, got {scheme.block}; available: torch"
        )
    found, shared = groups(weights, out, scales, scheme)
    device = weights[0].device
    with torch.cuda.device_of(weights[0]):
        tables = {g: torch.tensor(matrices, dtype=torch.int64).to(device) for g, (matrices, _) in found.items()}
        absmax = torch.zeros(shared if scheme.granularity == "tensor" else 1, dtype=torch.int32, device=device)
        likes = {t.dtype: t for t in weights}
        codes = {t.dtype: t if t.dtype == torch.int8 else t.view(torch.uint8) for t in out}
        # Every largest magnitude before the first code: matrices of a stack may be in different groups.
        if scheme.granularity == "tensor":
            for group, (matrices, programs) in found.items():
                absmax_kernel[(programs,)](
                    tables[group], likes[group.weight], absmax, len(matrices), ALIGNED=group.aligned,
                    ROWS=group.height, COLUMNS=group.width, num_warps=warps_of(group),
                )  # fmt: skip
        for group, (matrices, programs) in found.items():
            rows, columns = tile_of(group, scheme.granularity)
            quantize_kernel[(programs,)](
                tables[group], likes[group.weight], codes[group.out], absmax, len(matrices), scheme.largest,
                GRANULARITY=scheme.granularity, WHOLE=group.whole, FP8=scheme.name == "fp8", NATIVE=converts(device),
                UNSIGNED_ZERO=group.out == torch.float8_e4m3fnuz, ALIGNED=group.aligned, ROWS=rows, COLUMNS=columns,
                BLOCK=scheme.block, num_warps=warps_of(group),
            )  # fmt: skip


def tile_of(group: Group, granularity: str) -> tuple[int, int]:
    """Rows and columns of a program's tile, powers of two."""
    if granularity == "block":
        side = triton.next_power_of_2(group.width)
        return side if group.whole else min(side, _PIECE), side
    return group.height, group.width


def warps_of(group: Group) -> int:
    """More threads where each has an address an element to keep beside it."""
    return 16 if group.whole and not group.aligned else 8


def converts(device: torch.device) -> bool:
    """Whether the device has a conversion to e4m3fn that Triton knows: NVIDIA's from Ada on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _specialisation(function, dtype, out, granularity, width, targets=None, *, whole=True, aligned=True):
    """What kernels/benchmarks/ahead_of_time.py compiles."""
    height = (tile_height(width, aligned) if whole else 1) // (2 if granularity == "tensor" else 1)
    group = Group(torch.bfloat16, torch.int8, height, width, whole, aligned)
    rows, columns = tile_of(group, granularity)
    constants = {"GRANULARITY": granularity, "WHOLE": whole, "FP8": out != "i8", "NATIVE": out == "native fp8"}
    constants |= {"UNSIGNED_ZERO": out == "fnuz", "ALIGNED": aligned, "ROWS": rows, "COLUMNS": columns, "BLOCK": 128}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    special = {"table": "*i64", "weight_like": f"*{dtype}", "code_like": "*i8" if out == "i8" else "*u8"}
    special |= {"absmax": "*i32", "largest": "fp32"}
    types = {name: special.get(name, "i32") for name in function.arg_names if name not in constants}
    options = {"aligned": ("table", "weight_like", "code_like", "absmax") if aligned else ("table",)}
    options = {"aligned": tuple(n for n in options["aligned"] if n in types), "warps": warps_of(group)}
    return function.__name__, types, constants, options | ({"targets": targets} if targets else {})


_NATIVE = ("sm_90", "sm_100")
SPECIALISATIONS = {
    "absmax bf16": _specialisation(absmax_kernel, "bf16", "i8", "tensor", WIDTHS[0]),
    "int8 channel bf16": _specialisation(quantize_kernel, "bf16", "i8", "channel", WIDTHS[1]),
    "int8 channel bf16, wide": _specialisation(quantize_kernel, "bf16", "i8", "channel", WIDTHS[2]),
    "int8 channel bf16, wider": _specialisation(quantize_kernel, "bf16", "i8", "channel", WIDTHS[1], whole=False),
    "int8 channel fp32, unaligned": _specialisation(quantize_kernel, "fp32", "i8", "channel", WIDTHS[1], aligned=False),
    "int8 channel fp32, wider, unaligned": _specialisation(
        quantize_kernel, "fp32", "i8", "channel", WIDTHS[1], whole=False, aligned=False
    ),
    "int8 tensor fp32, unaligned": _specialisation(quantize_kernel, "fp32", "i8", "tensor", WIDTHS[0], aligned=False),
    "fp8 block fp32, unaligned": _specialisation(
        quantize_kernel, "fp32", "fp8", "block", _LARGEST_BLOCK, whole=False, aligned=False
    ),
    "int8 channel fp32": _specialisation(quantize_kernel, "fp32", "i8", "channel", WIDTHS[1]),
    "int8 tensor bf16": _specialisation(quantize_kernel, "bf16", "i8", "tensor", WIDTHS[0]),
    "fp8 channel bf16": _specialisation(quantize_kernel, "bf16", "fp8", "channel", WIDTHS[1]),
    "fp8 block bf16": _specialisation(quantize_kernel, "bf16", "fp8", "block", _LARGEST_BLOCK),
    "fp8 block bf16, fnuz": _specialisation(
        quantize_kernel, "bf16", "fnuz", "block", _LARGEST_BLOCK, ("gfx90a", "gfx942")
    ),
    "fp8 channel bf16, native": _specialisation(quantize_kernel, "bf16", "native fp8", "channel", WIDTHS[1], _NATIVE),
    "fp8 block bf16, native": _specialisation(quantize_kernel, "bf16", "native fp8", "block", _LARGEST_BLOCK, _NATIVE),
}
