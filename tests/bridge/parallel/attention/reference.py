"""Attention by its definition: a [T, T] mask, in float64."""

import torch


def attention(q, k, v, mask, scale, softcap=None, sinks=None):
    """q [T, H, D], k and v [T, H / G, D] under a boolean mask [T, T]; differentiable. sinks: [H]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    values = scores.softmax(-1)[..., : v.shape[1]] @ v
    return values.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def tensors(tokens, heads=(4, 2), dim=8, seed=0, dtype=torch.float32, device="cpu", value_dim=None):
    """q, k, v, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    widths = [(heads[0], dim), (heads[1], dim), (heads[1], value_dim or dim), (heads[0], value_dim or dim)]
    drawn = [torch.randn((tokens, *width), generator=generator, dtype=torch.float64) for width in widths]
    return [x.to(dtype).to(device) for x in drawn]


def with_gradients(function, *tensors):
    """The output and the gradients of all tensors but the last, which is the output's, in float64 on the CPU."""
    *inputs, grad = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out.backward(grad.to(out.dtype))
    return [x.detach().double().cpu() for x in (out, *(x.grad for x in inputs))]


def distance(a, b):
    """The largest difference, as a part of the largest number: over all of some tensors, the worst."""
    assert all(x.shape == y.shape for x, y in zip(a, b, strict=True))
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))
