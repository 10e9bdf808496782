"""How rows and vocabulary are cut, so that what is in memory at once does not depend on how many rows there are."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Float32 arrays of a block's size alive at once, the product's input in float32 included.
_TEMPORARIES = 5


class Blocks(NamedTuple):
    """Rows and entries of the vocabulary in a block."""

    rows: int
    entries: int


def blocks(vocabulary: int, features: int, workspace: int) -> Blocks:
    """The largest blocks whose temporaries stay within ``workspace`` bytes; a function of the model alone."""
    elements = max(1, workspace // (4 * _TEMPORARIES))
    # A weight tile [entries, H] in float32 is one of the temporaries.
    entries = max(1, min(vocabulary, 8192, elements // max(1, features)))
    return Blocks(max(1, elements // max(entries, features)), entries)


def tiles(vocabulary: int, entries: int) -> Iterator[tuple[int, int]]:
    """First and one past the last entry of each tile."""
    return ((start, min(start + entries, vocabulary)) for start in range(0, vocabulary, entries))


def row_blocks(count: int, mask: Tensor | None, size: int) -> Iterator[slice | Tensor]:
    """Rows a block at a time; with a mask only those that count (their number is read from the device)."""
    if mask is None:
        yield from (slice(start, min(start + size, count)) for start in range(0, count, size))
    else:
        yield from mask.nonzero()[:, 0].split(size)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with a result in ``dtype`` that was never rounded to less.

    On a GPU the products of two half-precision matrices are exact in the float32 accumulator; elsewhere the operands
    are widened first, and autocast, which would narrow them again, is off.
    """
    with torch.autocast(a.device.type, enabled=False):
        if _exact_in_half(a, b) and dtype == torch.float32:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a.to(dtype), b.to(dtype))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to less than ``total`` has."""
    with torch.autocast(a.device.type, enabled=False):
        if _exact_in_half(a, b) and total.dtype == torch.float32:
            total += torch.mm(a, b, out_dtype=torch.float32)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _exact_in_half(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
