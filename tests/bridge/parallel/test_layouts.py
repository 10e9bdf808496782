"""A model over several processes: logits, gradients, norm and one AdamW step are those of one process."""

import pytest

from tests.support import one_step
from tests.support.ranks import found_by_ranks

# replicate, shard, sequence, tensor
LAYOUTS = {
    "shard": ("Qwen2", (1, 2, 1, 1), {}),
    "replicate": ("Llama", (2, 1, 1, 1), {}),
    "sequence": ("Qwen3", (1, 1, 2, 1), {}),
    "zero2": ("Llama", (1, 2, 1, 1), {"reshard_after_forward": False, "activations": "offload_inputs"}),
    "recomputed": ("Qwen3", (1, 2, 1, 1), {"activations": "full"}),
    "tensor, tied": ("Llama", (1, 1, 1, 2), {"activations": "selective"}),
    "tensor, biases": ("Qwen2", (1, 1, 1, 2), {}),
    "tensor, norms of heads": ("Qwen3", (1, 1, 1, 2), {}),
    "tensor, a vocabulary that stays whole": ("Qwen2", (1, 1, 1, 2), {}, {"vocab_size": 43}),
    "offloaded": ("Qwen2", (1, 2, 1, 1), {"cpu_offload": True, "activations": "offload"}),
}
DOCUMENTS = {
    "documents, sequence": ("Qwen2", (1, 1, 2, 1)),
    "documents, tensor": ("Qwen3", (1, 1, 1, 2)),
    "documents, shard": ("Llama", (1, 2, 1, 1)),
}


def rank(number, address, queue):
    one_step.rank_of(LAYOUTS, DOCUMENTS, 2, number, address, queue)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(rank, 2, tmp_path_factory.mktemp("gloo"))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_is_that_of_one_process(ranks, name):
    one_step.assert_one_process(ranks, name, LAYOUTS[name])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_one_packed_row_are_those_of_one_process(ranks, name):
    one_step.assert_documents_of_one_process(ranks, name, DOCUMENTS[name])
