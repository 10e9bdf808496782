"""A model over several processes: logits, gradients, norm and one AdamW step are those of one process."""

import pytest
import torch
import torch.distributed as dist

from tests.bridge.parallel import one_step
from tests.ranks import results

# replicate, shard, sequence, tensor
LAYOUTS = {
    "shard": ("Qwen2", (1, 2, 1, 1), {}),
    "replicate": ("Llama", (2, 1, 1, 1), {}),
    "sequence": ("Qwen3", (1, 1, 2, 1), {}),
    "zero2": ("Llama", (1, 2, 1, 1), {"reshard_after_forward": False}),
    "recomputed": ("Qwen3", (1, 2, 1, 1), {"gradient_checkpointing": True}),
    "offloaded": ("Qwen2", (1, 2, 1, 1), {"cpu_offload": True}),
}


def step_of(host, family, sizes, options):
    from rl_bridge.parallel.config import ParallelConfig

    mesh = one_step.mesh_of(host, sizes)
    model = one_step.parallel(one_step.make(family), mesh, ParallelConfig(**options))
    ids = one_step.token_ids()[one_step.rows_of(sizes, host.slot)]
    return {name: value.numpy() for name, value in one_step.one_step(model, ids, mesh).items()}


def rank(number, address, queue):
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    torch.set_num_threads(1)
    try:
        host = one_step.host_of_rank()
        queue.put((number, {name: step_of(host, *case) for name, case in LAYOUTS.items()}))
    except BaseException:
        import traceback

        queue.put((number, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    received = results(rank, 2, tmp_path_factory.mktemp("gloo"))
    for _, found in received:
        assert isinstance(found, dict), found
    return received


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_is_that_of_one_process(ranks, name):
    family, sizes, _ = LAYOUTS[name]
    expected = one_step.one_step(one_step.make(family), one_step.token_ids(), None)
    for number, found in ranks:
        mine = {key: torch.from_numpy(value) for key, value in found[name].items()}
        assert mine.keys() == expected.keys()
        for key, value in mine.items():
            wanted = expected[key][one_step.rows_of(sizes, number)] if key == "logits" else expected[key]
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")
