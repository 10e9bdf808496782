"""What the sampler's Triton kernels share with cutoff.py and philox.py: keys, masses and noise."""

import triton
import triton.language as tl

_UNIT = tl.constexpr(2.0**40)


@triton.jit
def ordered_key(x):
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def mass_units(shifted):
    """e^{x − maximum} in units of 2⁻⁴⁰."""
    return (tl.exp(shifted) * _UNIT).to(tl.int64)


@triton.jit
def key_value(key):
    """The float with this key (int64)."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def key_mass(key, base):
    """The mass of an entry with this key."""
    return mass_units(key_value(key) - base)


@triton.jit
def gumbel(seed, position, index, PURPOSE: tl.constexpr):
    """Noise from int64 [ROWS, n] as philox.py has it; log1p by its quotient, which is exact to rounding for u ≤ ½."""
    zero = index * 0
    c0 = ((position & 0xFFFFFFFF) + zero).to(tl.uint32)
    c1 = (((position >> 32) & 0xFFFFFFFF) + zero).to(tl.uint32)
    high, low, _, _ = tl.philox(seed + zero, c0, c1, index.to(tl.uint32), (zero + PURPOSE).to(tl.uint32))
    upper = high >= 0x80000000
    high, low = tl.where(upper, high ^ 0xFFFFFFFF, high), tl.where(upper, low ^ 0xFFFFFFFF, low)
    u = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-64
    rest = 1.0 - u
    near = tl.where(rest == 1.0, u, -tl.log(rest) * tl.div_rn(u, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(tl.where(upper, -tl.log(u), near))
