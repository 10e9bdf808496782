"""From raw logits to the distribution's: softcap, then scale over temperature, then the kept set."""

import torch
from torch import Tensor


def scaled(logits: Tensor, inverse: Tensor, softcap: float | None, kept: Tensor | None = None) -> Tensor:
    """x = softcap·tanh(z/softcap)·inverse; −inf where z is −inf or the entry is not kept. A new tensor."""
    z = logits.to(inverse.dtype)
    if softcap is None:
        x = z * inverse[:, None]
    else:
        x = torch.tanh(z / softcap).mul_(softcap).mul_(inverse[:, None])
        # tanh turns an excluded −inf into a finite −softcap: it must stay impossible.
        x = x.masked_fill_(z == float("-inf"), float("-inf"))
    return x if kept is None else x.masked_fill_(~kept, float("-inf"))


def slope(x: Tensor, inverse: Tensor, softcap: float | None) -> Tensor | float:
    """dx/dz at scaled logits x (any shape [R, …]); where x is −inf the value is finite and means nothing."""
    inverse = inverse[:, None]
    if softcap is None:
        return inverse
    capped = (x / (inverse * softcap)).masked_fill_(x == float("-inf"), 1.0)
    return inverse * (1.0 - capped * capped)


def kept_tile(allowed_tokens: Tensor | None, rows: slice | Tensor, start: int, stop: int) -> Tensor | None:
    """Which of the entries start … stop − 1 are in each row's kept set: bool [R, stop − start].

    ``allowed_tokens`` is bool [N, V], or token ids [N, S] in any order in which −1 fills a shorter set.
    """
    if allowed_tokens is None:
        return None
    if allowed_tokens.dtype == torch.bool:
        return allowed_tokens[rows, start:stop]
    local = allowed_tokens[rows] - start
    width = stop - start
    inside = (local >= 0) & (local < width)
    kept = torch.zeros(local.shape[0], width + 1, dtype=torch.bool, device=allowed_tokens.device)
    return kept.scatter_(1, local.where(inside, width), True)[:, :width]


def kept_at(allowed_tokens: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Whether each of ``tokens`` [N, K] is in its row's kept set."""
    if allowed_tokens is None:
        return None
    if allowed_tokens.dtype == torch.bool:
        return allowed_tokens.gather(-1, tokens)
    return (allowed_tokens[:, None, :] == tokens[:, :, None]).any(-1)
