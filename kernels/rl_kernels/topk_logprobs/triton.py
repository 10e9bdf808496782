"""Triton for NVIDIA and ROCm: each logit is read once, by one sweep of a row whose bound rises to the k-th value.

A block of a row adds at most k candidates, whatever ties: there is a place for each, and nothing overflows. Now and
then the k best of them are kept; the last k are sorted. Nothing waits for the device, but for the number of rows that a
mask leaves from hidden states. float64, whose order and id do not fit into one integer, is searched as in torch.py.
"""

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import product
from rl_kernels.common.row_state import RowState
from rl_kernels.common.scaling import kept_tile
from rl_kernels.topk_logprobs import torch as in_torch
from rl_kernels.topk_logprobs.largest import NOTHING
from rl_kernels.topk_logprobs.triton_kernels import keep_kernel, search_kernel

# Bytes of candidates and of kept sets alive at once from logits, however many rows there are.
_WORKSPACE = 64 << 20
# Entries of a block at most, which one program has in registers.
BLOCK = 2048
# Candidates that a program has in registers where the best are kept.
KEPT_BLOCK = 1024
# Candidates of a row that it should not have many more of.
_CANDIDATES = 4096
# Rows of a program. The interpreter's price is by the program.
_ROWS = 64 if interpreting() else 1
# No candidate: below every one.
_NONE = -(2**63)


class Candidates:
    """Of some rows: ``room`` blocks' candidates beside the k best that were kept before."""

    def __init__(self, count: int, k: int, room: int, block: int, device: torch.device):
        self.k, self.block, self.capacity = k, block, places(k, room, block)
        self.rows = min(_ROWS, triton.next_power_of_2(max(1, count)))
        self.words = torch.empty(count, self.capacity, dtype=torch.int64, device=device)
        self.bounds = torch.full((count,), -(2**31), dtype=torch.int32, device=device)
        self.counts = torch.zeros(count, dtype=torch.int32, device=device)

    def search(
        self,
        logits: Tensor,
        kept: Tensor | None,
        first: int,
        last: int,
        identity: int,
        *,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        inverse: Tensor | None = None,
        softcap: float | None = None,
        patience: int,
    ) -> None:
        """Add those of the columns first … last − 1; blocks with more than ``patience`` of them raise the bound."""
        nothing = self.bounds
        search_kernel[(triton.cdiv(len(logits), self.rows),)](
            logits,
            nothing if kept is None else kept.view(torch.uint8),
            nothing if mask is None else mask.view(torch.uint8),
            nothing if inverse is None else inverse,
            self.bounds,
            self.counts,
            self.words,
            nothing if states is None else states,
            len(logits),
            first,
            last,
            identity,
            self.k,
            patience,
            self.capacity,
            logits.stride(0),
            logits.stride(1),
            0 if kept is None else kept.stride(0),
            0 if kept is None else kept.stride(1),
            softcap or 1.0,
            STATE=states is not None,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            MASKED=mask is not None,
            ROWS=self.rows,
            BLOCK=self.block,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )

    def keep(self) -> Tensor:
        """The k best of each row, in no order."""
        best = torch.full((len(self.words), self.k), _NONE, dtype=torch.int64, device=self.words.device)
        keep_kernel[(triton.cdiv(len(best), self.rows),)](
            self.words,
            self.bounds,
            self.counts,
            best,
            len(best),
            self.capacity,
            self.k,
            ROWS=self.rows,
            BLOCK=KEPT_BLOCK,
            num_warps=4,  # pyright: ignore[reportCallIssue]
        )
        return best

    def make_room(self) -> None:
        """Let go of all but the k best."""
        self.words[:, : self.k] = self.keep()


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    if logits.dtype == torch.float64:
        return in_torch.ids(logits, allowed_tokens, mask, k)
    count, vocabulary = logits.shape
    found = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    block = block_size(vocabulary)
    room = min(triton.cdiv(vocabulary, block), rooms(k, block))
    bytes_a_row = 8 * (places(k, room, block) + 3 * k)
    if allowed_tokens is not None and allowed_tokens.dtype != torch.bool:
        bytes_a_row += 2 * vocabulary + 32 * allowed_tokens.shape[1]
    for rows in row_blocks(count, None, max(1, _WORKSPACE // bytes_a_row)):
        here, kept = logits[rows], kept_tile(allowed_tokens, rows, 0, vocabulary)
        candidates = Candidates(len(here), k, room, block, logits.device)
        for first, last in tiles(vocabulary, room * block):
            if first:
                candidates.make_room()
            candidates.search(
                here, kept, first, last, first, mask=None if mask is None else mask[rows], patience=k // 2
            )
        found[rows] = identities(candidates.keep().sort(-1, descending=True).values)
    return found if mask is None else found.masked_fill_(~mask[:, None], 0)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    k: int,
    start: int,
    workspace: int,
) -> tuple[RowState, Tensor, Tensor]:
    """State of the entries start, start + 1, … that ``weight`` holds, and the k largest logits with their ids; where
    there are fewer entries, −inf and the id of no entry. In rows left out the state of no entry.
    """
    if inverse.dtype == torch.float64:
        return in_torch.forward(hidden, weight, bias, inverse, softcap, allowed_tokens, mask, k, start, workspace)
    count, vocabulary = len(hidden), len(weight)
    states = inverse.new_zeros(3, count)
    states[0] = float("-inf")
    values = inverse.new_full((count, k), float("-inf"))
    found = torch.full((count, k), NOTHING, device=hidden.device)
    # A quarter is for candidates. A logit is one number, and one byte of a kept set.
    size = blocks(vocabulary, weight.shape[1], workspace * 3 // 4, cost(hidden, weight, allowed_tokens, 4, 5))
    block = block_size(size.entries)
    a_tile = triton.cdiv(size.entries, block)
    # As many tiles' candidates as take that quarter where the rows are as many as their logits allow.
    spare = 5 * size.entries // (24 * min(k, block)) - 4
    room = a_tile * max(1, min(8, spare // a_tile, triton.cdiv(vocabulary, size.entries)))
    most = workspace // 4 // (8 * (places(k, room, block) + 3 * k))
    for rows in row_blocks(count, mask, max(1, min(size.rows, most))):
        here, state, scale = hidden[rows], states[:, rows].contiguous(), inverse[rows]
        candidates, filled = Candidates(len(here), k, room, block, hidden.device), 0
        for number, (first, last) in enumerate(tiles(vocabulary, size.entries)):
            # Beside what there is room for: the bound rises most while the entries double.
            if filled + a_tile > room or (number > 1 and number & (number - 1) == 0):
                candidates.make_room()
                filled = 0
            z = product(here, weight[first:last].T, inverse.dtype)
            if bias is not None:
                z += bias[first:last]
            kept = kept_tile(allowed_tokens, rows, start + first, start + last)
            candidates.search(z, kept, 0, last - first, first, states=state, inverse=scale, softcap=softcap, patience=k)
            filled += a_tile
        best = candidates.keep().sort(-1, descending=True).values
        order = (best >> 32).int()
        none = best == _NONE
        states[:, rows] = state
        values[rows] = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32).masked_fill_(none, float("-inf"))
        found[rows] = (identities(best) + start).masked_fill_(none, NOTHING)
    return RowState(states[0], states[1], states[2], inverse.new_empty(count, 0)), values, found


def block_size(entries: int) -> int:
    """Entries a program has at a time: a power of two, a function of the vocabulary and the workspace alone."""
    return min(BLOCK, max(16, triton.next_power_of_2(entries)))


def rooms(k: int, block: int) -> int:
    """Blocks whose candidates there should be a place for."""
    return max(1, _CANDIDATES // min(k, block) - 1)


def places(k: int, room: int, block: int) -> int:
    """Candidates that there can be of a row."""
    return k + room * min(k, block)


def identities(words: Tensor) -> Tensor:
    """Ids of candidates."""
    return 0xFFFFFFFF - (words & 0xFFFFFFFF)
