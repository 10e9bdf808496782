"""The algebra that every operation of vocabulary size shares, on torch tensors.

Four numbers sum up a row of scaled logits x. They merge associatively, so that tiles of a vocabulary, shards of a model
and ranks of a cluster combine to the same result. A backward pass needs two scalars a row.
`rl_fn.logprobs.row_state` is the reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """What some tokens contribute to a row: maximum = max x; sum_exp = Σ e^{x − maximum};
    weighted = Σ (x − maximum) e^{x − maximum}; target = x at the row's K target tokens, −inf for a target elsewhere.
    """

    maximum: Tensor
    sum_exp: Tensor
    weighted: Tensor
    target: Tensor


def empty_state(like: Tensor, tokens: Tensor) -> RowState:
    """The neutral element of ``merge_row_states`` for rows with ``tokens`` [R, K], of the dtype of ``like`` [R]."""
    nothing, excluded = torch.zeros_like(like), torch.full_like(like, float("-inf"))
    return RowState(excluded, nothing, nothing.clone(), like.new_full(tokens.shape, float("-inf")))


def tile_state(x: Tensor, tokens: Tensor) -> RowState:
    """State of a tile ``x`` [R, W]; −inf excludes a token. ``tokens`` [R, K] count from the tile's first token."""
    maximum = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:1], float("-inf"))
    shifted = x - finite(maximum)[:, None]
    e = torch.exp(shifted)
    # −inf · 0 would be NaN where a token is excluded; e^−1000 is 0 in float64 too.
    weighted = shifted.clamp_(min=-1000.0).mul_(e).sum(-1)
    inside = (tokens >= 0) & (tokens < x.shape[-1])
    if x.shape[-1]:
        target = x.gather(-1, tokens.where(inside, 0)).masked_fill(~inside, float("-inf"))
    else:
        target = x.new_full(tokens.shape, float("-inf"))
    return RowState(maximum, e.sum(-1), weighted, target)


def merge_row_states(a: RowState, b: RowState) -> RowState:
    """The state of both sets of tokens together; associative, with the empty state as its neutral element."""
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
    """Merged from the first to the last: every rank that merges the same states gets the same bits."""
    total = states[0]
    for state in states[1:]:
        total = merge_row_states(total, state)
    return total


def finalize_row_state(state: RowState) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the tokens, entropy and logsumexp. A row without a token has −inf, 0 and −inf."""
    total = state.sum_exp.where(state.sum_exp > 0, 1.0)
    logsumexp = state.maximum + torch.log(total)
    entropy = torch.log(total) - state.weighted / total
    return state.target - finite(logsumexp)[:, None], entropy, logsumexp


class Coefficients(NamedTuple):
    """dx = p·(a + b·log p), to which each target token's own cotangent is added."""

    a: Tensor
    b: Tensor


def coefficients(g: Tensor, h: Tensor, z: Tensor, entropy: Tensor) -> Coefficients:
    """The backward's two scalars a row, from the cotangents of log-probabilities [N, K], entropy and logsumexp [N]."""
    return Coefficients(z - g.sum(-1) - h * entropy, -h)


def token_gradients(coefficients: Coefficients, g: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """dx at the K tokens, summed in float32 before it is rounded (p − 1 in bf16 is 0 for a sure token).

    A token that occurs twice among the K has the sum of both cotangents in both places: store it, do not add it.
    """
    same = tokens[:, :, None] == tokens[:, None, :]
    p = torch.exp(logprobs)
    log_p = logprobs.masked_fill(p == 0, 0.0)
    # `same` sums the cotangents of equal tokens, once for each of them.
    own = (same * g[:, None, :]).sum(-1)
    return p * (coefficients.a[:, None] + coefficients.b[:, None] * log_p) + own


def finite(x: Tensor) -> Tensor:
    """0 in place of −inf, the maximum of a row without a token: a difference of two −inf would be NaN."""
    return x.masked_fill(x == float("-inf"), 0.0)
