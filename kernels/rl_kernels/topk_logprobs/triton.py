"""Triton for NVIDIA and ROCm: each logit is read once, by one sweep of a row whose bound rises to the k-th value.

A block of a row adds at most k candidates, also where logits tie: each candidate has a place, and none overflows. When
the places are used up, all candidates but the k best are dropped; the last k are sorted. From hidden states the host
reads the number of rows that a mask leaves, and otherwise never waits for the device. float64, whose order and id do
not fit into one integer, is searched as in torch.py.
"""

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.common.arguments import Problem
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import matmul
from rl_kernels.common.row_state import RowState
from rl_kernels.common.token_masks import allowed_tile
from rl_kernels.topk_logprobs import torch as in_torch
from rl_kernels.topk_logprobs.largest import NO_TOKEN
from rl_kernels.topk_logprobs.triton_kernels import keep_kernel, search_kernel

# Bytes of candidates and of masks of allowed tokens alive at once, however many rows of logits there are.
_WORKSPACE = 64 << 20
# Logits of a block at most, which one program has in registers.
BLOCK_N = 2048
# Candidates that a program of `keep` has in registers.
CANDIDATE_BLOCK = 1024
# About how many candidates a row should have at most.
_CANDIDATES = 4096
# Rows of a program. The interpreter's time is by the program.
_BLOCK_M = 64 if interpreting() else 1
# In place of a candidate where there is none: below every candidate.
_NONE = -(2**63)


class Candidates:
    """Of some rows: the k best so far, and ``room`` blocks' further candidates."""

    def __init__(self, count: int, k: int, room: int, block: int, device: torch.device):
        self.k, self.block, self.capacity = k, block, places(k, room, block)
        self.rows = min(_BLOCK_M, triton.next_power_of_2(max(1, count)))
        self.words = torch.empty(count, self.capacity, dtype=torch.int64, device=device)
        self.bounds = torch.full((count,), -(2**31), dtype=torch.int32, device=device)
        self.counts = torch.zeros(count, dtype=torch.int32, device=device)

    def search(
        self,
        logits: Tensor,
        allowed: Tensor | None,
        first: int,
        last: int,
        identity: int,
        *,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        inv_temperature: Tensor | None = None,
        softcap: float | None = None,
        patience: int,
    ) -> None:
        """Add the candidates among columns first … last − 1; a block with more than ``patience`` raises the bound."""
        nothing = self.bounds
        with torch.cuda.device_of(logits):
            search_kernel[(triton.cdiv(len(logits), self.rows),)](
                logits,
                nothing if allowed is None else allowed.view(torch.uint8),
                nothing if mask is None else mask.view(torch.uint8),
                nothing if inv_temperature is None else inv_temperature,
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
                0 if allowed is None else allowed.stride(0),
                0 if allowed is None else allowed.stride(1),
                softcap or 1.0,
                STATE=states is not None,
                CAPPED=softcap is not None,
                ALLOWED=allowed is not None,
                MASKED=mask is not None,
                BLOCK_M=self.rows,
                BLOCK_N=self.block,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )

    def keep(self) -> Tensor:
        """The k best of each row, in no order."""
        best = torch.full((len(self.words), self.k), _NONE, dtype=torch.int64, device=self.words.device)
        with torch.cuda.device_of(best):
            keep_kernel[(triton.cdiv(len(best), self.rows),)](
                self.words,
                self.bounds,
                self.counts,
                best,
                len(best),
                self.capacity,
                self.k,
                BLOCK_M=self.rows,
                BLOCK_N=CANDIDATE_BLOCK,
                num_warps=4,  # pyright: ignore[reportCallIssue]
            )
        return best

    def make_room(self) -> None:
        """Drop all but the k best."""
        self.words[:, : self.k] = self.keep()


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    if logits.dtype == torch.float64:
        return in_torch.ids(logits, allowed_tokens, mask, k)
    count, vocab_size = logits.shape
    found = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    block = block_size(vocab_size)
    room = min(triton.cdiv(vocab_size, block), rooms(k, block))
    bytes_a_row = 8 * (places(k, room, block) + 3 * k)
    if allowed_tokens is not None and allowed_tokens.dtype != torch.bool:
        bytes_a_row += 2 * vocab_size + 32 * allowed_tokens.shape[1]
    for rows in row_blocks(count, None, max(1, _WORKSPACE // bytes_a_row)):
        here, allowed = logits[rows], allowed_tile(allowed_tokens, rows, 0, vocab_size)
        candidates = Candidates(len(here), k, room, block, logits.device)
        for first, last in tiles(vocab_size, room * block):
            if first:
                candidates.make_room()
            candidates.search(
                here, allowed, first, last, first, mask=None if mask is None else mask[rows], patience=k // 2
            )
        found[rows] = identities(candidates.keep().sort(-1, descending=True).values)
    return found if mask is None else found.masked_fill_(~mask[:, None], 0)


def forward(problem: Problem, k: int, workspace: int) -> tuple[RowState, Tensor, Tensor]:
    """State of the weight's part of the vocabulary, and the k largest logits with their ids: −inf and ``NO_TOKEN``
    where there are fewer. In rows left out the empty state.
    """
    hidden, weight, bias, rows, start = problem
    scales = rows.inv_temperature
    if scales.dtype == torch.float64:
        return in_torch.forward(problem, k, workspace)
    count, vocab_size = len(hidden), len(weight)
    states = scales.new_zeros(3, count)
    states[0].fill_(float("-inf"))
    values = scales.new_full((count, k), float("-inf"))
    found = torch.full((count, k), NO_TOKEN, device=hidden.device)
    # A quarter of the workspace is for candidates. Each logit has one number, and a byte of the mask of allowed tokens.
    price = cost(hidden, weight, rows.allowed_tokens, 4, 5)
    size = blocks(vocab_size, weight.shape[1], workspace * 3 // 4, price)
    block = block_size(size.vocab)
    a_tile = triton.cdiv(size.vocab, block)
    # The candidates of as many tiles as fit into that quarter, at the block's number of tokens.
    spare = 5 * size.vocab // (24 * min(k, block)) - 4
    room = a_tile * max(1, min(8, spare // a_tile, triton.cdiv(vocab_size, size.vocab)))
    most = workspace // 4 // (8 * (places(k, room, block) + 3 * k))
    for index in row_blocks(count, rows.mask, max(1, min(size.tokens, most))):
        here, state, scale = hidden[index], states[:, index].contiguous(), scales[index]
        candidates, filled = Candidates(len(here), k, room, block, hidden.device), 0
        for number, (first, last) in enumerate(tiles(vocab_size, size.vocab)):
            # Also before tiles 2, 4, 8, …: the bound rises most while the number of logits seen doubles.
            if filled + a_tile > room or (number > 1 and number & (number - 1) == 0):
                candidates.make_room()
                filled = 0
            z = matmul(here, weight[first:last].T, scale.dtype)
            if bias is not None:
                z += bias[first:last]
            allowed = allowed_tile(rows.allowed_tokens, index, start + first, start + last)
            more = {"states": state, "inv_temperature": scale, "softcap": rows.softcap, "patience": k}
            candidates.search(z, allowed, 0, last - first, first, **more)
            filled += a_tile
        best = candidates.keep().sort(-1, descending=True).values
        order = (best >> 32).int()
        none = best == _NONE
        states[:, index] = state
        values[index] = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32).masked_fill_(none, float("-inf"))
        found[index] = (identities(best) + start).masked_fill_(none, NO_TOKEN)
    return RowState(states[0], states[1], states[2], scales.new_empty(count, 0)), values, found


def block_size(vocab: int) -> int:
    """Logits a program has at a time: a power of two, a function of the vocabulary and the workspace alone."""
    return min(BLOCK_N, max(16, triton.next_power_of_2(vocab)))


def rooms(k: int, block: int) -> int:
    """How many blocks' candidates should have a place."""
    return max(1, _CANDIDATES // min(k, block) - 1)


def places(k: int, room: int, block: int) -> int:
    """Places for a row's candidates."""
    return k + room * min(k, block)


def identities(words: Tensor) -> Tensor:
    """Ids of candidates."""
    return 0xFFFFFFFF - (words & 0xFFFFFFFF)
