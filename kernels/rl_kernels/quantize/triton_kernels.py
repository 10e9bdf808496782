"""What the Triton kernels share with scheme.py and torch.py: magnitudes, scales and codes.

Magnitudes are compared as the integers their bits make: the order of the numbers, infinity above them and NaN above
that, where a maximum of floats would drop NaN.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from rl_kernels.quantize.table import Matrix

_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-23)
_FIELDS = tl.constexpr(len(Matrix._fields))
_FIRST = tl.constexpr(Matrix._fields.index("first"))


@triton.jit
def magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(peak, largest):
    """The scale of what has this largest magnitude, with 1 in place of NaN; and whether it is not NaN."""
    finite = peak < _INFINITY
    magnitude = tl.where(finite, peak, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.zeros_like(magnitude) + largest)
    return tl.where(finite, tl.where(scale == 0.0, _SMALLEST_SCALE, scale), 1.0), finite


@triton.jit
def int8_codes(x, scale, finite):
    """Halves to even: at 1.5·2²³ a float's last bit is 1, and its bits count up from there."""
    ratio = tl.div_rn(tl.where(finite, x, 0.0), scale)
    ratio = tl.minimum(tl.maximum(ratio, -128.0), 127.0)
    return ((ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def fp8_codes(x, scale, finite, NATIVE: tl.constexpr, UNSIGNED_ZERO: tl.constexpr):
    """Bits of e4m3fn as uint8: by the device's own conversion, or in integers, which every device has."""
    ratio = tl.div_rn(tl.where(finite, x, 0.0), scale)
    ratio = tl.minimum(tl.maximum(ratio, -448.0), 448.0)
    if NATIVE:
        codes = ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = ratio.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Three bits of mantissa stay, rounded to even; the carry goes where it belongs. 120 is 127 − 7, the biases'.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2⁻⁶ a step is 2⁻⁹, which is what a float's last bit is at 2¹⁴.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    if UNSIGNED_ZERO:
        codes = tl.where(codes == 0x80, 0, codes).to(tl.uint8)
    return codes


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
    table, weight_like, absmax, entries, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The largest magnitude of each tensor, as its bits: their order is that of the numbers, so that none is lost."""
    program = tl.program_id(0)
    field = table + entry_of(table, entries, program) * _FIELDS
    columns, row_stride = tl.load(field + 4), tl.load(field + 5)
    if ALIGNED:
        columns, row_stride = tl.multiple_of(columns, 16), tl.multiple_of(row_stride, 16)
    local = program - tl.load(field + 9)
    across = tl.load(field + 10)
    row = (local // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (local % across) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    UNSIGNED_ZERO: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
        top, left = local * BLOCK_M, local * 0
        rows = tl.minimum(rows, top + BLOCK_M)
    elif GRANULARITY == "block":
        top, left = (local // across) * BLOCK, (local % across) * BLOCK
        rows, columns = tl.minimum(rows, top + BLOCK), tl.minimum(columns, left + BLOCK)
    else:
        top, left = (local // across) * BLOCK_M, (local % across) * BLOCK_N
    row, column = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)

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
        down = BLOCK_M if GRANULARITY == "block" else 0
        right = 0 if GRANULARITY == "block" else BLOCK_N
        steps = tl.cdiv(rows - top, BLOCK_M) if GRANULARITY == "block" else tl.cdiv(columns, BLOCK_N)
        peak = tl.zeros([BLOCK_M], tl.int32)
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
