"""Attention by its definition: a [T, T] mask, in float64."""

import torch


def attention(q, k, v, mask, scale):
    """q [T, H, D], k and v [T, H / G, D] under a boolean mask [T, T]; differentiable."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = (scale * q @ k.mT).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def tensors(tokens, heads=(4, 2), dim=8, seed=0, dtype=torch.float32, device="cpu"):
    """q, k, v, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).to(device) for x in drawn]


def with_gradients(function, q, k, v, grad):
    """The output and the gradients of q, k and v, in float64 on the CPU."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*inputs)
    out.backward(grad.to(out.dtype))
    return [x.detach().double().cpu() for x in (out, *(x.grad for x in inputs))]


def distance(a, b):
    """The largest difference, as a part of the largest number: over all of some tensors, the worst."""
    assert all(x.shape == y.shape for x, y in zip(a, b, strict=True))
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))
