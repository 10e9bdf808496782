"""What the Triton kernels share with scheme.py and torch.py: magnitudes, scales and codes.

Magnitudes are compared as the integers their bits make: the order of the numbers, infinity above them and NaN above
that, where a maximum of floats would drop NaN.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-23)


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
