"""PyTorch. A tile of the vocabulary is drawn by its mass, then a token of that tile. Together that is the distribution
itself, with noise for some hundred tiles and one tile's tokens instead of the whole vocabulary.

Rows that nothing is cut off are read in chunks that a cache holds. Only a search for a cutoff has large temporaries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.common.row_state import finite
from rl_kernels.sampling.cutoff import EMPTY, Parameters, allowed, find, greedy_is_top_1, tile_width
from rl_kernels.sampling.philox import TILES, TOKENS, gumbel

# Logits of a chunk. A search has a handful of temporaries of 8 bytes a logit, else there are two of 4 bytes.
_CHUNK, _CACHED = 1 << 22, 1 << 17
_NOTHING = float("-inf")


class Sums(NamedTuple):
    """Of every tile [R, T]: maximum, Σ e^{x − maximum} and Σ (x − maximum) e^{x − maximum}."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    temperature, k, p, log_min_p, seed, position = parameters
    heat, count = greedy_is_top_1(temperature, k)
    cuts = bool(((count < logits.shape[-1]) | (p < 1) | (log_min_p > _NOTHING)).any())
    warm = bool((heat != 1).any())
    step = max(1, (_CHUNK if cuts else _CACHED) // logits.shape[-1])
    parts = []
    for first in range(0, max(1, len(logits)), step):
        rows = slice(first, first + step)
        x = _scaled(logits[rows], heat[rows], warm)
        full = sums(x)
        parts.append((*full, *(_cut(x, count[rows], p[rows], log_min_p[rows]) if cuts else (*full, *_uncut(x)))))
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    full, truncated, (number, cutoff, last) = Sums(*joined[:3]), Sums(*joined[3:6]), joined[6:]

    tile = drawn_tile(truncated, seed, position)
    ids = tile_ids(tile, logits.shape[-1])
    values = _scaled(at(logits, ids), heat, warm)
    values = values.masked_fill(~allowed(values, cutoff, last, ids), _NOTHING) if cuts else values
    best = drawn_place(values, ids, seed, position)
    maximum, log_total, full_entropy = merged(full)
    _, log_allowed, entropy = merged(truncated) if cuts else (maximum, log_total, full_entropy)
    # The largest logit is always allowed: both distributions have the same maximum.
    shifted = values.gather(-1, best)[:, 0] - finite(maximum)
    token = ids.gather(-1, best)[:, 0].masked_fill(number == 0, -1)
    full_logprob = (shifted - log_total).masked_fill((temperature == 0) & (token >= 0), 0.0)
    return token, shifted - log_allowed, full_logprob, entropy, number, cutoff, last, maximum + log_total


def _scaled(logits: Tensor, temperature: Tensor, warm: bool) -> Tensor:
    # Division by 1 would copy.
    return logits.float() / temperature[:, None] if warm else logits.float()


def _cut(x: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor) -> tuple[Tensor, ...]:
    """Sums of what is allowed, its number, the cutoff's key and id."""
    cutoff, last = find(x, k, p, log_min_p)
    inside = allowed(x, cutoff, last)
    return *sums(x.masked_fill(~inside, _NOTHING)), inside.sum(-1), cutoff, last


def _uncut(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of tokens that are possible, and a cutoff that allows them all."""
    number = torch.full(x.shape[:1], x.shape[-1], device=x.device)
    if bool((x.amin(-1) == _NOTHING).any()):
        number = (x > _NOTHING).sum(-1)
    return number, torch.full_like(number, EMPTY), torch.full_like(number, -1)


def sums(x: Tensor) -> Sums:
    """Of rows x [R, V]; −inf excludes a token."""
    width = tile_width(x.shape[-1])
    if x.shape[-1] % width:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % width), value=_NOTHING)
    tiles = x.unflatten(1, (-1, width))
    maximum = tiles.amax(-1)
    shifted = tiles - finite(maximum)[..., None]
    e = torch.exp(shifted)
    # −inf · 0 would be NaN; e^−1000 is 0.
    return Sums(maximum, e.sum(-1), shifted.clamp_(min=-1000.0).mul_(e).sum(-1))


def merged(tiles: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, log Σ e^{x − maximum} and entropy of rows."""
    maximum = tiles.maximum.amax(-1)
    moved = (tiles.maximum - finite(maximum)[:, None]).masked_fill(tiles.maximum == _NOTHING, 0.0)
    scale = torch.exp(moved)
    total = (tiles.total * scale).sum(-1).where(maximum > _NOTHING, 1.0)
    log_total = torch.log(total)
    return maximum, log_total, log_total - (scale * (tiles.weighted + moved * tiles.total)).sum(-1) / total


def drawn_tile(tiles: Sums, seed: Tensor, position: Tensor) -> Tensor:
    """The tile [R] that each row draws."""
    if tiles.maximum.shape[1] == 1:
        return torch.zeros_like(seed)
    mass = torch.log(tiles.total.where(tiles.maximum > _NOTHING, 1.0)) + tiles.maximum
    index = torch.arange(mass.shape[1], device=mass.device)
    return (mass + gumbel(seed[:, None], position[:, None], index, TILES)).argmax(-1)


def tile_ids(tile: Tensor, vocab_size: int) -> Tensor:
    """Ids [R, W] of a tile's tokens; past the end of the vocabulary they go on."""
    width = min(vocab_size, tile_width(vocab_size))
    return tile[:, None] * width + torch.arange(width, device=tile.device)


def at(x: Tensor, ids: Tensor) -> Tensor:
    """x [R, V] at ids, −inf past the end."""
    there = ids < x.shape[-1]
    return x.gather(-1, ids.clamp(max=x.shape[-1] - 1)).masked_fill(~there, _NOTHING)


def drawn_place(values: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Which of a tile's tokens is drawn, [R, 1], from their scaled logits [R, W]; −inf cannot be drawn."""
    return (values + gumbel(seed[:, None], position[:, None], ids, TOKENS)).argmax(-1, keepdim=True)
