"""Inputs of the fused log-probabilities, and their values and gradients in float64."""

import torch

from tests.kernels.cases import N, V, normal, tokens_for
from tests.kernels.exact import exact, gradients
from tests.kernels.operations import linear_logprobs

H = 19


def model(dtype=torch.float32):
    return normal(N, H, scale=1.0).to(dtype), normal(V, H, scale=1.0, seed=1).to(dtype), normal(V, seed=2).to(dtype)


def cotangents(targets):
    first = normal(N, seed=5) if targets is None else normal(N, targets, seed=5)
    return first, normal(N, seed=6), normal(N, seed=7)


def assert_equal_to_float64(backend, options, *, targets=None, biased=True, workspace=None, dtype=torch.float32):
    hidden, weight, bias = model(dtype)
    tokens = tokens_for(options, targets=targets)
    leaves = [hidden.clone(), weight.clone(), *([bias.clone()] if biased else [])]
    if "mask" in options:
        leaves[0][~options["mask"]] = float("nan")
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    more = {} if workspace is None else {"workspace": workspace}
    got = linear_logprobs(*leaves[:2], tokens, bias=leaves[2] if biased else None, **options, **more, backend=backend)
    clean = doubles[0] if "mask" not in options else torch.where(options["mask"][:, None], doubles[0], 0.0)
    logits = clean @ doubles[1].T + (doubles[2] if biased else 0.0)
    wanted = exact(logits, tokens, **options)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-4)
    c = cotangents(targets)
    size = max(1.0, 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item())
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    mine, theirs = gradients(got, [x.float() for x in c], leaves), gradients(wanted, c, doubles)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=max(rounding, 3e-5), atol=max(rounding, 1e-4) * size)
