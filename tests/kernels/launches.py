"""A launch of every operation."""

import torch

from tests.kernels.cases import N, V, ids, normal
from tests.kernels.operations import (
    int8_matmul,
    linear_logprobs,
    linear_topk_logprobs,
    logits_logprobs,
    quantize_,
    sample,
    topk_logprobs,
)

H = 16


def linear(backend):
    hidden, weight = (x.float().requires_grad_() for x in (normal(N, H, scale=1.0), normal(V, H, seed=1)))
    linear_logprobs(hidden, weight, ids(N), temperature=0.7, backend=backend).logprobs.sum().backward()


def logits(backend):
    leaf = normal(N, V).float().requires_grad_()
    logits_logprobs(leaf, ids(N), temperature=0.7, softcap=5.0, backend=backend).entropy.sum().backward()


def top_k(backend):
    topk_logprobs(normal(N, V).float(), 3, temperature=0.7, backend=backend)
    top_k_of_hidden(backend)


def top_k_of_hidden(backend):
    linear_topk_logprobs(normal(N, H).float(), normal(V, H, seed=1).float(), 3, backend=backend)


def sampled(backend):
    sample(normal(N, V).float(), temperature=0.7, seed=1, position=2, check=False, backend=backend)


def quantized(backend):
    out, scales = torch.empty(N, V, dtype=torch.int8), torch.empty(N, 1)
    quantize_([normal(N, V).float()], [out], [scales], backend=backend)


def multiplied(backend):
    codes, scale = ids(V, H, high=100).to(torch.int8), torch.ones(V)
    int8_matmul(normal(N, H).float(), codes, scale, backend=backend)


CALLS = {
    "linear_logprobs": linear,
    "logits_logprobs": logits,
    "topk_logprobs": top_k,
    "sampling": sampled,
    "quantize": quantized,
    "int8_matmul": multiplied,
}
