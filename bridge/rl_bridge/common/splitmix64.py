"""64-bit mixing in torch integer arithmetic: the same bits on every device."""

import torch

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(bits: torch.Tensor) -> torch.Tensor:
    """One step of splitmix64 on each int64, a bijection; int64 arithmetic wraps as uint64 would."""
    bits = bits + signed(GOLDEN)
    bits = (bits ^ logical_shift(bits, 30)) * signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ logical_shift(bits, 27)) * signed(0x94D049BB133111EB)
    return bits ^ logical_shift(bits, 31)


def logical_shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right by ``by`` bits; torch's ``>>`` on int64 copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def signed(value: int) -> int:
    """The int64 that has the bits of ``value`` modulo 2⁶⁴."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
