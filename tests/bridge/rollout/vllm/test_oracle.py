"""After several updates an engine of vLLM is, bit for bit, an engine that starts from the trainer's weights."""

import copy

import pytest
import torch

from rl_bridge.executors import LocalExecutor
from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import StateSource
from tests.bridge.rollout.vllm.policies import make_model, open_vllm, rollout, trainer, worker_of
from tests.bridge.rollout.vllm.samples import sampled

pytestmark = pytest.mark.vllm
# Of the engine's matrices, and the trainer's arithmetic beside it.
KINDS = {
    "float32": ("fp32", "float32"),
    "bfloat16": ("bf16", "bfloat16"),
    "int8": ("int8", "float32"),
    "lora": ("fp32", "float32"),
}


def merged(model):
    """The model that a peft model computes, by peft's own merging of a copy."""
    return copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize("kind", KINDS)
def test_an_updated_engine_equals_one_that_starts_from_the_same_weights(kind, tmp_path):
    precision, arithmetic = KINDS[kind]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    # bfloat16 has a tied head; the others have one of their own.
    model, executor = make_model(tied=kind == "bfloat16"), LocalExecutor("cpu")
    through = write_checkpoint(StateSource(model), tmp_path / "start", precision, dtype=dtype)
    engine, worker = rollout(
        lambda folder: open_vllm(folder, precision=precision), tmp_path / "start", executor, precision=precision
    )
    policy = trainer(model, executor, adapter=kind == "lora", dtype=arithmetic)
    try:
        before = sampled(worker.client)
        for number in range(1, 4):
            policy.advance()
            assert policy.sync_weights(engine, through=through) == number == engine.weights_version
        after = sampled(worker.client)
        assert worker.updated.replaced == 0
    finally:
        worker.client.close()
    trained = worker_of(policy).model
    whole = merged(trained) if kind == "lora" else trained
    write_checkpoint(StateSource(whole), tmp_path / "end", precision, dtype=dtype)
    fresh = open_vllm(tmp_path / "end", precision=precision)
    try:
        assert sampled(fresh) == after != before
    finally:
        fresh.close()
