"""A vocabulary in unequal shards over two processes gives what one process gives, bit for bit on both ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels.cases import OPTIONS, N, V, ids, normal
from tests.kernels.exact import gradients
from tests.kernels.operations import linear_topk_logprobs
from tests.support.ranks import results

H, K = 19, 5
# The first rank holds the last ids, and only three of them: fewer than K.
SHARDS = [(V - 3, V), (0, V - 3)]
NAMES = ["plain", "temperatures", "softcap", "allowed_tokens", "mask", "ties"]


def everything(name, shard, group, k=K):
    """Ids, values and gradients of hidden states and of the shard's weight and bias."""
    first, last = shard
    hidden, weight, bias = normal(N, H, scale=1.0), normal(V, H, seed=1), normal(V, seed=2)
    if name == "ties":
        hidden, weight, bias = ids(N, H, high=3).double(), ids(V, H, seed=1, high=2).double(), torch.zeros(V)
    leaves = [hidden.float(), weight[first:last].float(), bias[first:last].float()]
    hidden, weight, bias = (x.requires_grad_() for x in leaves)
    options = OPTIONS.get(name, {})
    outputs = linear_topk_logprobs(hidden, weight, k, bias=bias, start=first, group=group, **options)
    c = (normal(N, k, seed=5).float(), normal(N, seed=6).float(), normal(N, seed=7).float())
    return [*(x.detach() for x in outputs), *gradients(outputs[1:], c, (hidden, weight, bias))]


def rank(number, address, queue):
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    torch.set_num_threads(1)
    try:
        results: dict[str, Any] = {
            n: [x.numpy() for x in everything(n, SHARDS[number], dist.group.WORLD)] for n in NAMES
        }
        try:
            everything("plain", SHARDS[number], dist.group.WORLD, k=V + 1)
        except ValueError as error:
            results["refused"] = str(error)
        queue.put((number, results))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return [found for _, found in results(rank, 2, tmp_path_factory.mktemp("gloo"))]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(shards, name):
    whole = everything(name, (0, V), None)
    ranks = [[torch.from_numpy(x) for x in results[name]] for results in shards]
    for index in range(5):  # ids, values and the gradient of the hidden states: the same on both ranks
        assert torch.equal(ranks[0][index], ranks[1][index])
        torch.testing.assert_close(ranks[0][index], whole[index], rtol=1e-5, atol=2e-5)
    for index in (5, 6):  # each rank has its own part of the weight's and the bias's
        ours = torch.cat([ranks[1][index], ranks[0][index]])
        torch.testing.assert_close(ours, whole[index], rtol=1e-5, atol=2e-5)


def test_more_than_the_shards_have_together_is_refused_by_both(shards):
    message = f"k is {V + 1}, more than the vocabulary of the group's shards together"
    assert [results["refused"] for results in shards] == [message] * 2
