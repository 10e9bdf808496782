"""Philox4x32-10 (Salmon et al., SC 2011) in int64 arithmetic, and Gumbel noise from it.

The key is a request's seed and the counter what is drawn, so that noise depends on neither batch nor device.
"""

import torch
from torch import Tensor

TILES, TOKENS = 0, 1
"""The counter's last word: noise for drawing a tile, and for drawing a token of the tile."""

_MASK = 0xFFFFFFFF


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits from a 64-bit key and a counter of four 32-bit words, in int64 tensors that broadcast."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # The product's 64 bits are right though int64 reads them as signed.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, index: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
    """A number u uniform in (0, 1) from 64 bits, as (min(u, 1 − u), whether u ≥ ½): exact near both ends in float32."""
    high, low, _, _ = philox(seed, position & _MASK, (position >> 32) & _MASK, index, index.new_full((), purpose))
    upper = high >= 1 << 31
    flip = upper * _MASK
    high, low = high ^ flip, low ^ flip
    return high.float() * 2.0**-32 + (low.float() + 0.5) * 2.0**-64, upper


def gumbel(seed: Tensor, position: Tensor, index: Tensor, purpose: int) -> Tensor:
    """−log E with E = −log1p(−u) exponential."""
    u, upper = uniform(seed, position, index, purpose)
    return -torch.log(torch.where(upper, -torch.log(u), -torch.log1p(-u)))
