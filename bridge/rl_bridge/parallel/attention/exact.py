"""Attention of one block by matrix products: any widths, dtypes, masks and soft caps, in bounded memory.

Scores are made for some queries at a time, and in the backward pass again: never for all of a long block.
"""

from collections.abc import Iterator

import torch

MOST_SCORES = 1 << 20
"""Scores that are in memory at once, unless those of one query are more: so many stay in a CPU's caches."""
GPU_SCORES = 32 * MOST_SCORES
"""The same on a GPU, which small products leave idle."""


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its logsumexp, [B, H, Lq, Dv] and [B, H, Lq] (float32, or float64 for float64).

    A query that sees no key has output 0 and logsumexp −inf.

    q: [B, H, Lq, D]. k: [B, H / G, Lk, D]. v: [B, H / G, Lk, Dv]. mask: True where a query sees a key, or what is added
    to scores; broadcast to [B, H, Lq, Lk]. softcap: a score z becomes softcap · tanh(z / softcap), before the mask.
    """
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    wide_k, wide_v = _wide(k), _wide(v)
    for rows, keys in _parts(q, k, causal):
        scores = _scores(q[:, :, rows], wide_k[:, :, keys], scale, softcap)[0]
        scores = _masked(scores, rows, keys, causal, mask)
        part = scores.logsumexp(-1)
        probabilities = torch.exp(scores.sub_(_finite(part)[..., None]))
        values = probabilities.flatten(2, 3) @ wide_v[:, :, keys]
        out[:, :, rows] = values.view(*probabilities.shape[:4], -1).flatten(1, 2)
        lse[:, :, rows] = part.flatten(1, 2)
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's part of the gradients of q, k and v, where out and lse are those of all of the queries' blocks."""
    dq = torch.empty_like(q)
    wide_k, wide_v = _wide(k), _wide(v)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for rows, keys in _parts(q, k, causal):
        scores, slope = _scores(q[:, :, rows], wide_k[:, :, keys], scale, softcap)
        scores = _masked(scores, rows, keys, causal, mask)
        upstream = _of_key_heads(_wide(grad[:, :, rows]), k)
        centre = (_wide(grad[:, :, rows]) * _wide(out[:, :, rows])).sum(-1)
        probabilities = torch.exp(scores.sub_(_finite(_of_key_heads(lse[:, :, rows], k))[..., None]))
        dscores = (upstream.flatten(2, 3) @ wide_v[:, :, keys].mT).view_as(probabilities)
        dscores.sub_(_of_key_heads(centre, k)[..., None]).mul_(probabilities).mul_(scale)
        if slope is not None:
            dscores.mul_(slope)
        dscores, probabilities = dscores.flatten(2, 3), probabilities.flatten(2, 3)
        dq[:, :, rows] = (dscores @ wide_k[:, :, keys]).view(*upstream.shape[:4], -1).flatten(1, 2).to(q.dtype)
        dk[:, :, keys] += dscores.mT @ _of_key_heads(_wide(q[:, :, rows]), k).flatten(2, 3)
        dv[:, :, keys] += probabilities.mT @ upstream.flatten(2, 3)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _parts(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Some queries after others, and the keys up to the last that any of them sees."""
    most = MOST_SCORES if q.device.type == "cpu" else GPU_SCORES
    size = max(1, most // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        yield slice(start, stop), slice(0, stop if causal else k.shape[2])


def _scores(
    q: torch.Tensor, wide_k: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [B, H / G, G, Lq, Lk] before any mask, and their derivative by what the soft cap caps."""
    queries = _of_key_heads(_wide(q), wide_k)
    scores = (queries.flatten(2, 3) @ wide_k.mT).view(*queries.shape[:4], wide_k.shape[2]).mul_(scale)
    if softcap is None:
        return scores, None
    capped = scores.div_(softcap).tanh_()
    return capped * softcap, 1 - capped.square()


def _masked(scores: torch.Tensor, rows: slice, keys: slice, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + rows.start)
        scores = scores.masked_fill_(later, float("-inf"))
    if mask is not None:
        mask = mask[..., rows if mask.shape[-2] > 1 else slice(None), keys if mask.shape[-1] > 1 else slice(None)]
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, scores.shape[1:3])
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """The logsumexp by which probabilities are divided: any number where no key is seen, since exp(−inf) is 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _of_key_heads(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, H, L, …] as [B, H / G, G, L, …]."""
    return x.unflatten(1, (k.shape[1], -1))
