"""The algebra that every operation of vocabulary size shares, on torch tensors.

A row of scaled logits x is summed up by four numbers that merge associatively, so that tiles of a vocabulary, shards of
a model and ranks of a cluster combine to the same result; a backward pass needs two scalars a row.
`rl_fn.logprobs.row_state` is the reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """What some entries of a row contribute: maximum = max x; sum_exp = Σ e^{x − maximum};
    weighted = Σ (x − maximum) e^{x − maximum}; target = x at the row's K tokens, −inf where they are elsewhere.
    """

    maximum: Tensor
    sum_exp: Tensor
    weighted: Tensor
    target: Tensor


def empty_state(like: Tensor, tokens: Tensor) -> RowState:
    """``merge``'s neutral element, for as many rows as ``like`` [R] has, of its dtype, and their ``tokens`` [R, K]."""
    nothing, excluded = torch.zeros_like(like), torch.full_like(like, float("-inf"))
    return RowState(excluded, nothing, nothing.clone(), like.new_full(tokens.shape, float("-inf")))


def tile_state(x: Tensor, tokens: Tensor) -> RowState:
    """State of a tile ``x`` [R, W]; −inf excludes an entry. ``tokens`` [R, K] count from the tile's first entry."""
    maximum = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:1], float("-inf"))
    shifted = x - finite(maximum)[:, None]
    e = torch.exp(shifted)
    # −inf · 0 would be NaN where an entry is excluded; e^−1000 is 0 in float64 too.
    weighted = shifted.clamp_(min=-1000.0).mul_(e).sum(-1)
    inside = (tokens >= 0) & (tokens < x.shape[-1])
    if x.shape[-1]:
        target = x.gather(-1, tokens.where(inside, 0)).masked_fill(~inside, float("-inf"))
    else:
        target = x.new_full(tokens.shape, float("-inf"))
    return RowState(maximum, e.sum(-1), weighted, target)


def merge(a: RowState, b: RowState) -> RowState:
    """The state of both sets of entries together; associative, with the empty state as its neutral element."""
    maximum = torch.maximum(a.maximum, b.maximum)
    base = finite(maximum)
    shift_a, shift_b = (torch.where(s.maximum.isinf(), 0.0, s.maximum - base) for s in (a, b))
    scale_a, scale_b = (torch.exp(shift).where(s.sum_exp > 0, 0.0) for s, shift in ((a, shift_a), (b, shift_b)))
    return RowState(
        maximum,
        a.sum_exp * scale_a + b.sum_exp * scale_b,
        scale_a * (a.weighted + shift_a * a.sum_exp) + scale_b * (b.weighted + shift_b * b.sum_exp),
        torch.maximum(a.target, b.target),
    )


def merge_all(states: Sequence[RowState]) -> RowState:
    """Merged from the first to the last, so that every rank gets the same bits."""
    total = states[0]
    for state in states[1:]:
        total = merge(total, state)
    return total


def finish(state: RowState) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the tokens, entropy and logsumexp. A row without entries has −inf, 0 and −inf."""
    total = state.sum_exp.where(state.sum_exp > 0, 1.0)
    logsumexp = state.maximum + torch.log(total)
    entropy = torch.log(total) - state.weighted / total
    return state.target - finite(logsumexp)[:, None], entropy, logsumexp


class Coefficients(NamedTuple):
    """dx = p·(a + b·log p), then the targets' own gradient on top."""

    a: Tensor
    b: Tensor


def coefficients(g: Tensor, h: Tensor, z: Tensor, entropy: Tensor) -> Coefficients:
    """The backward's two scalars a row, from the cotangents of log-probabilities [N, K], entropy and logsumexp [N]."""
    return Coefficients(z - g.sum(-1) - h * entropy, -h)


def token_gradients(coefficients: Coefficients, g: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """dx at the K tokens, summed in float32 before anything rounds it (p − 1 in bf16 is 0 for a sure token).

    A token that occurs twice among the K gets the sum of both cotangents, twice: to be stored, not added.
    """
    same = tokens[:, :, None] == tokens[:, None, :]
    p = torch.exp(logprobs)
    log_p = logprobs.masked_fill(p == 0, 0.0)
    # Stored twice means that the sum must be of each distinct cotangent once: `same` does it.
    own = (same * g[:, None, :]).sum(-1)
    return p * (coefficients.a[:, None] + coefficients.b[:, None] * log_p) + own


def finite(x: Tensor) -> Tensor:
    """0 for −inf, so that differences with it are not NaN: a row without any entry."""
    return x.masked_fill(x == float("-inf"), 0.0)
