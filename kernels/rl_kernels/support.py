"""Kept sets in the packed form that kernels read: a bit an entry."""

import torch
from torch import Tensor


def packed(support: Tensor, vocabulary: int) -> Tensor:
    """int32 [N, ⌈V/32⌉] of a support in either form (bool [N, V], or ids [N, S] with −1 for a shorter set)."""
    count = len(support)
    words = -(-vocabulary // 32)
    if support.dtype == torch.bool:
        bits = torch.zeros(count, words * 32, dtype=torch.uint8, device=support.device)
        bits[:, :vocabulary] = support
    else:
        bits = torch.zeros(count, words * 32 + 1, dtype=torch.uint8, device=support.device)
        inside = (support >= 0) & (support < vocabulary)
        # The column past the end takes what is no entry.
        bits.scatter_(1, support.where(inside, words * 32), 1)
        bits = bits[:, :-1]
    weights = 2 ** torch.arange(8, device=support.device, dtype=torch.uint8)
    packed = (bits.reshape(count, words * 4, 8) * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32)  # little-endian, as every device here is
