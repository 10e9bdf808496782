"""An engine of vLLM opens in this process, is what was asked for, closes, and leaves the process as it was."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_bridge.rollout.vllm import VLLMOptions

SMALL = {"max_num_seqs": 8, "kv_cache_gib": 0.05}


@pytest.mark.vllm
def test_an_engine_is_what_was_asked_for_and_leaves_the_process_as_it_was(folder):
    from rl_bridge.rollout.vllm.vllm_engine import close_engine, open_engine

    before = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    engine = open_engine(folder, VLLMOptions(max_model_len=64, arguments=("block_size=32",), **SMALL))
    try:
        found = engine.vllm_config.model_config
        assert (found.dtype, found.quantization, found.max_model_len) == (torch.float32, None, 64)
        assert engine.vllm_config.cache_config.block_size == 32
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
        assert torch.set_num_threads is before[1] and torch.get_num_threads() == before[2]
        changed = {name for name in os.environ.keys() | before[0].keys() if os.environ.get(name) != before[0].get(name)}
        assert not {name for name in changed if "PROCESSING" in name or "KVCACHE" in name or "BIND" in name}
        with pytest.raises(ValueError, match="has an engine of vLLM already"):
            open_engine(folder, VLLMOptions(**SMALL))
    finally:
        close_engine(engine)
    close_engine(engine)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not quantised, and precision int8"):
        open_engine(folder, VLLMOptions(precision="int8", dtype="float32", **SMALL))
    with pytest.raises(ValueError, match="computes in bfloat16, and float32"):
        open_engine(folder, VLLMOptions(**SMALL), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"'nowhere' has none"):
        open_engine("nowhere", VLLMOptions())


@pytest.mark.vllm
def test_a_process_group_of_the_trainer_outlives_the_engine(folder):
    from rl_bridge.rollout.vllm.vllm_engine import close_engine, open_engine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        engine = open_engine(folder, VLLMOptions(**SMALL))
        assert dist.group.WORLD is world
        close_engine(engine)
        assert dist.group.WORLD is world
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "precision is one of fp32, .*got 'int4'"),
        ({"dtype": "half"}, "dtype is one of float32, .*got 'half'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be positive, got 0"),
        ({"arguments": ("block_size",)}, "NAME=JSON, got 'block_size'"),
    ],
)
def test_options_that_no_engine_can_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMOptions(**options)
