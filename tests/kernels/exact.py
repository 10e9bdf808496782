"""The definition in float64 torch, with autograd's gradient: what every backend is compared with."""

import torch
from torch import Tensor

INF = float("inf")


def allowed_mask(allowed_tokens: Tensor | None, vocabulary: int, rows: int) -> Tensor:
    """bool [rows, V] of an allowed_tokens in either form."""
    if allowed_tokens is None:
        return torch.ones(rows, vocabulary, dtype=torch.bool)
    if allowed_tokens.dtype == torch.bool:
        return allowed_tokens.expand(rows, vocabulary)
    allowed = torch.zeros(rows, vocabulary, dtype=torch.bool)
    for row, ids in zip(allowed, allowed_tokens, strict=True):
        row[ids[ids >= 0]] = True
    return allowed


def exact(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and logsumexp of float64 logits [N, V], differentiable; 0 where masked."""
    z = logits.double()
    possible = (z > -INF) & allowed_mask(allowed_tokens, z.shape[1], len(z))
    if mask is not None:
        z = torch.where(mask[:, None], z, 0.0)
    z = torch.where(possible, z, 0.0)
    z = z * logit_scale
    x = z if softcap is None else softcap * torch.tanh(z / softcap)
    heat = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    x = x / heat
    shift = torch.where(possible, x, -INF).amax(-1, keepdim=True).detach().nan_to_num(neginf=0.0)
    e = torch.where(possible, torch.exp(x - shift), 0.0)
    total = e.sum(-1)
    some = total > 0
    log_total = torch.log(torch.where(some, total, 1.0))
    lse = torch.where(some, log_total + shift[:, 0], -INF)
    log_p = torch.where(possible, x - shift - log_total[:, None], 0.0)
    p = torch.where(possible, torch.exp(log_p), 0.0)
    entropy = -(p * log_p).sum(-1)
    ids = tokens if tokens.dim() == 2 else tokens[:, None]
    drawn = torch.where(possible.gather(1, ids), log_p.gather(1, ids), -INF)
    drawn = drawn if tokens.dim() == 2 else drawn[:, 0]
    if mask is not None:
        drawn = torch.where(mask[:, None] if tokens.dim() == 2 else mask, drawn, 0.0)
        entropy, lse = torch.where(mask, entropy, 0.0), torch.where(mask, lse, 0.0)
    return drawn, entropy, lse


def gradients(outputs, cotangents, leaves) -> list[Tensor]:
    """Gradients of Σ cotangent · output over the outputs that are finite: −inf is constant."""
    total = sum((torch.where(o.isfinite(), o, 0.0) * c).sum() for o, c in zip(outputs, cotangents, strict=True))
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
