"""Kept sets in the packed form that kernels read: a bit an entry."""

import torch
from torch import Tensor


def packed(allowed_tokens: Tensor, vocabulary: int) -> Tensor:
    """int32 [N, ⌈V/32⌉] of an allowed_tokens in either form (bool [N, V], or ids [N, S] with −1 for a shorter set)."""
    count = len(allowed_tokens)
    words = -(-vocabulary // 32)
    if allowed_tokens.dtype == torch.bool:
        bits = torch.zeros(count, words * 32, dtype=torch.uint8, device=allowed_tokens.device)
        bits[:, :vocabulary] = allowed_tokens
    else:
        bits = torch.zeros(count, words * 32 + 1, dtype=torch.uint8, device=allowed_tokens.device)
        inside = (allowed_tokens >= 0) & (allowed_tokens < vocabulary)
        # The column past the end takes what is no entry.
        bits.scatter_(1, allowed_tokens.where(inside, words * 32), 1)
        bits = bits[:, :-1]
    weights = 2 ** torch.arange(8, device=allowed_tokens.device, dtype=torch.uint8)
    packed = (bits.reshape(count, words * 4, 8) * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32)  # little-endian, as every device here is
