"""Moves free memory: weights, the optimiser's state, the KV cache. Counted in bytes that anything still refers to."""

import copy
import gc

import pytest
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.models.small import TinySource
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.rollout import InProcessRollout

BATCH = collate([single_turn([2, 3], [4, 5, 1]), single_turn([6], [7, 1])], 0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=1)


def bytes_alive():
    gc.collect()
    found = {}
    for value in gc.get_objects():
        # Weights that oneDNN has packed have no storage; another test's may still be alive (CORE-14).
        if isinstance(value, torch.Tensor) and not value.is_meta and not value.is_mkldnn:
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def test_weights_that_onednn_packed_elsewhere_are_counted_as_nothing():
    """CORE-14: the count raised while another test's packed weights were alive."""
    before = bytes_alive()
    packed = torch.ones(8, 8).to_mkldnn()
    assert packed.is_mkldnn and bytes_alive() == before


@pytest.fixture
def source(tokenizer):
    return TinySource.for_tokenizer(tokenizer, hidden=64, layers=2, heads=2)


def update(engine):
    engine.train_step(NeedParallel(BATCH), 5.0)
    return engine.optimizer_step()


def test_training_memory_is_freed_and_comes_back_with_a_checkpoint(source):
    before = bytes_alive()
    engine = TrainEngine(lambda: SupervisedModule(source, OPTIMIZER, updates=10)).build()
    weights = bytes_alive() - before
    update(engine)
    state = copy.deepcopy(engine.checkpoint_state())
    with_state = bytes_alive()
    moments = 2 * sum(p.nbytes for p in source.whole().parameters())
    assert weights > moments / 2

    engine.to("meta", "optimizer")
    assert with_state - bytes_alive() >= moments
    for call in (lambda: update(engine), engine.checkpoint_state, lambda: engine.cpu("optimizer")):
        with pytest.raises(ValueError, match="the optimiser's state was freed: load a checkpoint first"):
            call()
    assert engine.token_logprobs(NeedParallel(BATCH)).isfinite().all()

    freed = bytes_alive()
    engine.meta()
    assert freed - bytes_alive() >= moments / 2
    engine.load_checkpoint_state(state)
    again = TrainEngine(lambda: SupervisedModule(source, OPTIMIZER, updates=10)).build()
    again.load_checkpoint_state(state)
    assert update(engine) == update(again)

    del state
    with_both = bytes_alive()
    engine.release(), again.release()
    assert with_both - bytes_alive() >= 2 * (moments + moments / 2)


def test_a_rollout_keeps_no_cache_and_frees_its_weights(source, tokenizer):
    engine = InferenceEngine(lambda: InProcessRollout(source, tokenizer)).build()
    before = bytes_alive()
    engine.generate(["1+1=", "12+34="], SamplingParams(max_new_tokens=8, n=4))
    assert bytes_alive() - before < 1000
    engine.meta()
    assert before - bytes_alive() >= sum(p.nbytes for p in source.whole().parameters())
