"""Attention sinks: a learned logit of each head that takes a part of the probability and has no value.

A sink is one more logit in the logsumexp. With the logsumexp of keys and sink, and the output made smaller by the
part of the sink, the backward pass of the keys' blocks is what it is without sinks.
"""

import torch


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp with the sinks, from those of the keys alone.

    out: [*, D]. lse: [*]. sinks: broadcast to [*].
    """
    sinks = sinks.to(lse.dtype)
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def sinks_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks, where out and lse are what ``with_sinks`` gave and grad is the gradient of out."""
    part = torch.exp(sinks.to(lse.dtype) - lse)
    return -(part * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
