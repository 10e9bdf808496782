"""The k largest logits of a row in an order without ambiguity: by value, then by the lower id."""

import torch
from torch import Tensor

# In place of an id where there is none: it comes after every real id where values tie.
NO_TOKEN = 2**62


def largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values [R, k] and columns [R, k] of the k largest of ``z`` [R, W], k ≤ W; NaN of either sign is the largest."""
    if z.dtype == torch.float64:
        ordered, columns = z.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :k], columns[:, :k]
    # torch.topk takes any of equal values. One integer a logit has no equal: the float's order in the high half, the
    # column counted backwards in the low one. Adding 0 turns −0 into 0.
    bits = (z.float() + 0.0).view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    # NaN has either sign: inf − inf is negative on some machines and positive on others.
    bits.masked_fill_(z.isnan(), 0x7FFFFFFF)
    key = bits.long()
    del bits
    key.bitwise_left_shift_(32)
    key += torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    low = key.topk(k, -1).values.bitwise_and_(0xFFFFFFFF)
    columns = z.shape[-1] - 1 - low
    return z.gather(-1, columns), columns


def joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of two sets of values and ids in order, where equal values of ``a`` have the lower ids."""
    values, order = torch.cat([a[0], b[0]], -1).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], torch.cat([a[1], b[1]], -1).gather(-1, order)[:, :k]


def merged(parts: list[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of sets whose ids interleave in any way."""
    values, ids = (torch.cat(field, -1) for field in zip(*parts, strict=True))
    ids, order = ids.sort(-1)
    values, first = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids.gather(-1, first)[:, :k]
