"""Row-chunked PyTorch. A tile of the vocabulary is drawn by its mass, then a token of that tile. Together that is the
distribution itself, with noise for some hundred tiles and one tile's tokens instead of the whole vocabulary.
"""

import torch
from torch import Tensor

from rl_kernels.common.row_state import finite
from rl_kernels.sampling.cutoff import Parameters, allowed, find, greedy_is_top_1, tile_width
from rl_kernels.sampling.philox import TILES, TOKENS, gumbel

# Logits of a chunk, which has a handful of temporaries of 8 bytes a logit.
_CHUNK = 1 << 22


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    temperature, k, p, log_min_p, seed, position = parameters
    heat, count = greedy_is_top_1(temperature, k)
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    parts = [
        _rows(*(argument[first : first + step] for argument in (logits, heat, count, p, log_min_p, seed, position)))
        for first in range(0, max(1, len(logits)), step)
    ]
    tokens, logprobs, full, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, logprobs, full.masked_fill((temperature == 0) & (tokens >= 0), 0.0), *rest


def _rows(logits, temperature, k, p, log_min_p, seed, position):
    x = logits.float() / temperature[:, None]
    cutoff, last = find(x, k, p, log_min_p)
    inside = allowed(x, cutoff, last)
    full, truncated = tiled(x), tiled(x.masked_fill(~inside, float("-inf")))
    token = draw(truncated, seed, position)
    maximum, log_total, _ = _state(full)
    _, log_allowed, entropy = _state(truncated)
    # The largest logit is always allowed: both distributions have the same maximum.
    shifted = x.gather(-1, token[:, None])[:, 0] - finite(maximum)
    allowed_count = inside.sum(-1)
    return (
        token.masked_fill(allowed_count == 0, -1),
        shifted - log_allowed,
        shifted - log_total,
        entropy,
        allowed_count,
        cutoff,
        last,
        maximum + log_total,
    )


def tiled(x: Tensor) -> Tensor:
    """Rows [R, V] as [R, T, W], −inf past the end."""
    width = tile_width(x.shape[-1])
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % width), value=float("-inf")).unflatten(1, (-1, width))


def draw(tiles: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The id drawn from scaled logits [R, T, W]; −inf cannot be drawn."""
    count, number, width = tiles.shape
    top = tiles.amax(-1)
    mass = torch.log(torch.exp(tiles - finite(top)[..., None]).sum(-1).where(top > float("-inf"), 1.0)) + top
    index = torch.arange(max(number, width), device=tiles.device)
    seed, position = seed[:, None], position[:, None]
    tile = (mass + gumbel(seed, position, index[:number], TILES)).argmax(-1)
    won = tiles[torch.arange(count, device=tiles.device), tile]
    first = tile[:, None] * width
    return (won + gumbel(seed, position, first + index[:width], TOKENS)).argmax(-1) + first[:, 0]


def _state(tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, log Σ e^{x − maximum} and entropy of rows [R, T, W]."""
    maximum = tiles.amax((-1, -2))
    shifted = tiles - finite(maximum)[:, None, None]
    e = torch.exp(shifted)
    total = e.sum(-1).sum(-1)
    weighted = shifted.masked_fill_(e == 0, 0.0).mul_(e).sum(-1).sum(-1)
    total = total.where(maximum > float("-inf"), 1.0)
    log_total = torch.log(total)
    return maximum, log_total, log_total - weighted / total
