"""PyTorch. A tile of the vocabulary is drawn by its mass, then a token of that tile. Together that is the distribution
itself, with noise for some hundred tiles and one tile's tokens instead of the whole vocabulary.

Sums are taken in chunks that a cache holds. A mask is of floats: a comparison that makes bools is not vectorised.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.common.row_state import finite
from rl_kernels.sampling.cutoff import (
    EMPTY,
    Cutoff,
    Parameters,
    Workspace,
    allowed,
    find,
    greedy_is_top_1,
    key_value,
    tile_width,
)
from rl_kernels.sampling.philox import TILES, TOKENS, gumbel

# Logits of a chunk. A search has some fifty small steps a chunk, and so larger ones; sums are taken in small ones.
_CHUNK, _CACHED = 1 << 21, 1 << 17
_NOTHING = float("-inf")
_LEAST = torch.finfo(torch.float32).min


class Sums(NamedTuple):
    """Of every tile [R, T]: maximum, Σ e^{x − maximum} and Σ (x − maximum) e^{x − maximum}."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


class Terms(NamedTuple):
    """Of every tile [R, T] the maximum, and of every token [R, T, W] x − maximum and e^{x − maximum}."""

    maximum: Tensor
    shifted: Tensor
    e: Tensor


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
    work = Workspace.of_call(logits)
    for first in range(0, max(1, len(logits)), step):
        rows = slice(first, first + step)
        x = _scaled(logits[rows], heat[rows], warm)
        cutoff = find(x, count[rows], p[rows], log_min_p[rows], work) if cuts else None
        # −inf is never allowed.
        least = None if cutoff is None else key_value(cutoff.key)[:, None, None].clamp_(min=_LEAST)
        size = max(1, _CACHED // x.shape[-1]) if x.device.type == "cpu" else step
        for start in range(0, max(1, len(x)), size):
            some = slice(start, start + size)
            tiles = _tiles(x[some], work)
            terms = _terms(tiles, work)
            if cutoff is None or least is None:
                full = _summed(terms)
                parts.append((*full, *full, *_uncut(x[some])))
            else:
                # The entropy of all tokens is read only where none is cut off.
                total = terms.e.sum(-1)
                mine = Cutoff(*(column[some] for column in cutoff))
                cut, number = _cut(tiles, terms, mine, least[some], work)
                parts.append((terms.maximum, total, total, *cut, number, mine.key, mine.last))
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


def _cut(tiles: Tensor, terms: Terms, cutoff: Cutoff, least: Tensor, work: Workspace) -> tuple[Sums, Tensor]:
    """Sums of what is allowed and its number, from the terms of all tokens, which are overwritten.

    A tile with an allowed token has its maximum allowed: what is left of its terms are those of the allowed tokens.
    """
    inside = torch.ge(tiles, least, out=work("inside", tuple(tiles.shape), tiles))
    if bool(cutoff.partial.any()):
        some = cutoff.partial.nonzero()[:, 0]
        mine, at_most = tiles[some], least[some]
        ids = torch.arange(tiles[0].numel(), dtype=torch.float32, device=tiles.device).view(tiles.shape[1:])  # exact
        early = torch.le(ids, cutoff.last[some, None, None].float(), out=torch.empty_like(mine))
        ties = torch.eq(mine, at_most, out=torch.empty_like(mine))
        inside[some] = mine.gt_(at_most).add_(ties.mul_(early))
    terms.e.mul_(inside)
    number = inside.sum(-1)
    cut = _summed(terms._replace(maximum=terms.maximum.masked_fill(number == 0, _NOTHING)))
    return cut, number.sum(-1).long()


def _uncut(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of tokens that are possible, and a cutoff that allows them all."""
    number = torch.full(x.shape[:1], x.shape[-1], device=x.device)
    if bool((x.amin(-1) == _NOTHING).any()):
        number = (x > _NOTHING).sum(-1)
    return number, torch.full_like(number, EMPTY), torch.full_like(number, -1)


def sums(x: Tensor) -> Sums:
    """Of rows x [R, V]; −inf excludes a token."""
    work = Workspace()
    return _summed(_terms(_tiles(x, work), work))


def _terms(tiles: Tensor, work: Workspace) -> Terms:
    maximum, shape = tiles.amax(-1), tuple(tiles.shape)
    shifted = torch.sub(tiles, finite(maximum)[..., None], out=work("shifted", shape, tiles))
    return Terms(maximum, shifted, torch.exp(shifted, out=work("terms", shape, tiles)))


def _summed(terms: Terms) -> Sums:
    """The sums; x − maximum is overwritten."""
    # −inf · 0 would be NaN; e^−1000 is 0.
    weighted = terms.shifted.clamp_(min=-1000.0).mul_(terms.e)
    return Sums(terms.maximum, terms.e.sum(-1), weighted.sum(-1))


def _tiles(x: Tensor, work: Workspace) -> Tensor:
    """Rows [R, V] as tiles [R, T, W], the last one filled up with −inf."""
    width, size = tile_width(x.shape[-1]), x.shape[-1]
    if size % width:
        x, row = work("tiles", (len(x), size + -size % width), x), x
        x[:, :size], x[:, size:] = row, _NOTHING
    return x.unflatten(1, (-1, width))


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
