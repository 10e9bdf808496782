"""Two kinds of parallelism at once, over four processes."""

import pytest

from tests.support import one_step
from tests.support.ranks import found_by_ranks

# 13 rows of a matrix on each tensor rank, which two shards do not divide.
UNEVEN = {"intermediate_size": 26}
# replicate, shard, sequence, tensor
LAYOUTS = {
    "replicated shards": ("Qwen2", (2, 2, 1, 1), {}),
    "shards of sequences": ("Llama", (1, 2, 2, 1), {}),
    "shards of tensors": ("Qwen3", (1, 2, 1, 2), {}, UNEVEN),
    "shards of tensors, not tied": ("Qwen2", (1, 2, 1, 2), {"reshard_after_forward": False}, UNEVEN | {"tied": False}),
    "replicated tensors": ("Llama", (2, 1, 1, 2), {"activations": "full"}),
    "sequences of tensors": ("Qwen2", (1, 1, 2, 2), {}),
    "four tensor ranks": ("Llama", (1, 1, 1, 4), {}, {"num_key_value_heads": 4}),
    "four shards": ("Qwen3", (1, 4, 1, 1), {}, UNEVEN),
}
DOCUMENTS = {
    "documents, sequence of tensors": ("Qwen3", (1, 1, 2, 2)),
    "documents, shards of sequences": ("Llama", (1, 2, 2, 1)),
    "documents, replicated sequences": ("Qwen2", (2, 1, 2, 1)),
    "documents, four sequence ranks": ("Llama", (1, 1, 4, 1)),
}

pytestmark = pytest.mark.slow


def rank(number, address, queue):
    one_step.rank_of(LAYOUTS, DOCUMENTS, 4, number, address, queue)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(rank, 4, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_is_that_of_one_process(ranks, name):
    one_step.assert_one_process(ranks, name, LAYOUTS[name])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_one_packed_row_are_those_of_one_process(ranks, name):
    one_step.assert_documents_of_one_process(ranks, name, DOCUMENTS[name])
