"""A vocabulary in unequal shards over three processes gives what one process gives, bit for bit on every rank."""

import pytest
import torch
import torch.distributed as dist

from tests.kernels.cases import OPTIONS, N, V, ids, normal
from tests.kernels.exact import gradients
from tests.kernels.operations import linear_logprobs
from tests.support.ranks import results

H = 19
CUTS = [0, 5, 30, V]
NAMES = ["plain", "temperatures", "softcap", "allowed_tokens", "mask"]


def everything(options, first, last, group):
    """Values and gradients of hidden states and of the shard's weight and bias."""
    leaves = [
        normal(N, H, scale=1.0).float(),
        normal(V, H, seed=1)[first:last].float(),
        normal(V, seed=2)[first:last].float(),
    ]
    hidden, weight, bias = (x.requires_grad_() for x in leaves)
    outputs = linear_logprobs(hidden, weight, ids(N, 3), bias=bias, start=first, group=group, **options)
    c = (normal(N, 3, seed=5).float(), normal(N, seed=6).float(), normal(N, seed=7).float())
    return [*(x.detach() for x in outputs), *gradients(outputs, c, (hidden, weight, bias))]


def rank(number, address, queue):
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=3)
    torch.set_num_threads(1)
    try:
        results = {n: everything(OPTIONS[n], CUTS[number], CUTS[number + 1], dist.group.WORLD) for n in NAMES}
        queue.put((number, {n: [x.numpy() for x in tensors] for n, tensors in results.items()}))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return [found for _, found in results(rank, 3, tmp_path_factory.mktemp("gloo"))]


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_equal_one(shards, name):
    whole = everything(OPTIONS[name], 0, V, None)
    ranks = [[torch.from_numpy(x) for x in results[name]] for results in shards]
    for index in range(4):  # the values and the gradient of the hidden states: the same on every rank
        assert all(torch.equal(r[index], ranks[0][index]) for r in ranks)
        torch.testing.assert_close(ranks[0][index], whole[index], rtol=1e-5, atol=2e-5)
    for index in (4, 5):  # each rank has its own part of the weight's and the bias's
        torch.testing.assert_close(torch.cat([r[index] for r in ranks]), whole[index], rtol=1e-5, atol=2e-5)
