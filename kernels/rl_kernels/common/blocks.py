"""How tokens and vocabulary are cut, so that the memory in use at once does not depend on the number of tokens."""

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.common.matmul import native

# More of the vocabulary than that in a tile would only take tokens away from the block.
_MOST_VOCAB = 8192
# A GEMM whose sizes are multiples of this leaves no part of a multiprocessor's tile unused.
_UNIT = 128


class Blocks(NamedTuple):
    """Tokens in a block, and how much of the vocabulary."""

    tokens: int
    vocab: int


class Cost(NamedTuple):
    """Bytes that a block holds: for each logit, for each hidden unit of a token, for each hidden unit of a row of the
    weight, and for each token.
    """

    logit: int
    token_unit: int
    weight_unit: int
    token: int = 0


def cost(
    hidden: Tensor, weight: Tensor, allowed_tokens: Tensor | None, width: int, logit: int, *, gradients: bool = False
) -> Cost:
    """The cost of a block of ``hidden @ weight.T`` in an arithmetic of ``width`` bytes a number, with ``logit`` bytes a
    logit of the backend's own, and the masks of allowed tokens.
    """
    own = native(hidden, weight)
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    widened = width if (half or hidden.dtype != weight.dtype) and not own.matmul else 0
    # With a mask, the hidden states of the tokens that count are copied.
    token_unit, weight_unit = hidden.element_size() + widened, widened
    if gradients:
        # dL/dhidden is summed in the arithmetic's dtype; where torch cannot add a GEMM to a sum, the GEMM's result lies
        # beside the sum.
        added = 0 if own.accumulate or not own.matmul else width
        token_unit, weight_unit = token_unit + width + added, weight_unit + added
    if allowed_tokens is None:
        return Cost(logit, token_unit, weight_unit)
    # The mask of a block has a byte a logit. Ids are copied twice (16 bytes), with two bools.
    return Cost(
        logit + 1, token_unit, weight_unit, 0 if allowed_tokens.dtype == torch.bool else 18 * allowed_tokens.shape[1]
    )


def blocks(vocab_size: int, hidden_size: int, workspace: int, cost: Cost) -> Blocks:
    """The largest blocks that stay within ``workspace`` bytes; a function of the model alone.

    A block is as wide as it is high where the vocabulary allows: each block of tokens reads and writes dL/dweight again
    and each tile of the vocabulary dL/dhidden, which is the least traffic for a square.
    """
    linear = hidden_size * (cost.token_unit + cost.weight_unit) + cost.token
    square = (sqrt(linear**2 + 4 * cost.logit * workspace) - linear) / (2 * cost.logit)
    vocab = _whole(min(vocab_size, _MOST_VOCAB, int(square)))
    # As few tiles as that takes, all of about one size.
    even = -(-vocab_size // -(-vocab_size // vocab)) if vocab_size else 1
    vocab = min(vocab, -(-even // _UNIT) * _UNIT)
    a_token = vocab * cost.logit + hidden_size * cost.token_unit + cost.token
    return Blocks(_whole((workspace - vocab * hidden_size * cost.weight_unit) // a_token), vocab)


def _whole(size: int) -> int:
    """``size`` rounded down to a multiple of the unit; below one unit ``size`` itself, 1 at least."""
    return max(1, size if size < _UNIT else size // _UNIT * _UNIT)


def tiles(vocab_size: int, vocab: int) -> Iterator[tuple[int, int]]:
    """First token, and one past the last token, of each tile of the vocabulary."""
    return ((start, min(start + vocab, vocab_size)) for start in range(0, vocab_size, vocab))


def row_blocks(count: int, mask: Tensor | None, size: int) -> Iterator[slice | Tensor]:
    """Rows a block of at most ``size`` at a time, as few blocks as that takes, of about one size.

    With a mask only the rows that count, whose number the host reads from the device.
    """
    if mask is None:
        step = balanced(count, size)
        yield from (slice(start, min(start + step, count)) for start in range(0, count, step))
    else:
        index = mask.nonzero()[:, 0]
        yield from index.split(balanced(len(index), size))


def balanced(count: int, size: int) -> int:
    """Rows of a block: a short last block would read and write all of dL/dweight for a few rows."""
    even = -(-count // max(1, -(-count // size)))
    return max(1, even if size < _UNIT else min(size, -(-even // _UNIT) * _UNIT))
