"""Masks of the tokens that a truncated sampler allows: of a tile of the vocabulary, at some tokens, packed into bits.

``allowed_tokens`` is bool [N, V], or token ids [N, S] in any order, filled with −1 where a row has fewer.
"""

import torch
from torch import Tensor


def allowed_tile(allowed_tokens: Tensor | None, rows: slice | Tensor, start: int, stop: int) -> Tensor | None:
    """Which of the tokens start … stop − 1 each row allows: bool [R, stop − start]."""
    if allowed_tokens is None:
        return None
    if allowed_tokens.dtype == torch.bool:
        return allowed_tokens[rows, start:stop]
    local = allowed_tokens[rows] - start
    width = stop - start
    inside = (local >= 0) & (local < width)
    # Ids outside the tile are scattered into a column past its end.
    allowed = torch.zeros(local.shape[0], width + 1, dtype=torch.bool, device=allowed_tokens.device)
    return allowed.scatter_(1, local.where(inside, width), True)[:, :width]


def allowed_at(allowed_tokens: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Whether its row allows each of ``tokens`` [N, K]."""
    if allowed_tokens is None:
        return None
    if allowed_tokens.dtype == torch.bool:
        return allowed_tokens.gather(-1, tokens)
    return (allowed_tokens[:, None, :] == tokens[:, :, None]).any(-1)


def packed(allowed_tokens: Tensor, vocab_size: int) -> Tensor:
    """One bit a token, as kernels read masks: int32 [N, ⌈V/32⌉], bit i of word j for token 32·j + i."""
    count = len(allowed_tokens)
    words = -(-vocab_size // 32)
    if allowed_tokens.dtype == torch.bool:
        bits = torch.zeros(count, words * 32, dtype=torch.uint8, device=allowed_tokens.device)
        bits[:, :vocab_size] = allowed_tokens
    else:
        bits = torch.zeros(count, words * 32 + 1, dtype=torch.uint8, device=allowed_tokens.device)
        inside = (allowed_tokens >= 0) & (allowed_tokens < vocab_size)
        # −1, and every other id outside the vocabulary, is scattered into a column past the end.
        bits.scatter_(1, allowed_tokens.where(inside, words * 32), 1)
        bits = bits[:, :-1]
    weights = 2 ** torch.arange(8, device=allowed_tokens.device, dtype=torch.uint8)
    packed = (bits.reshape(count, words * 4, 8) * weights).sum(-1, dtype=torch.uint8)
    # Little-endian, as every supported device is.
    return packed.view(torch.int32)
