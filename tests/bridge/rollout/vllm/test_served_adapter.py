"""LoRA adapters that reach a real server of vLLM as such, and the one that is started after it was killed."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.executors.session import LocalExecutor
from rl_bridge.models.model_source import StateSource
from rl_bridge.rollout.served.served_engine import ServedDecoder
from rl_bridge.rollout.served.served_rollout import ServedRollout
from rl_bridge.rollout.served.vllm_server import ServedOptions
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from tests.bridge.rollout.vllm.policies import trainer, worker_of
from tests.bridge.rollout.vllm.served_core import core_of, full_forward

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
OPTIONS = VLLMOptions(max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25, adapter_rank=4)
SAMPLING = SamplingParams(max_new_tokens=24, n=3, seed=4)
NEAR = 1e-4
"""Between factors beside the weights and the trainer's own, as in an engine in the process (test_adapter.py)."""


def drawn(engine):
    """One request at a time: which rows a server computes together, and so their last bits, depends on time."""
    made = [engine.generate([prompt], replace(SAMPLING, n=1))[0] for prompt in PROMPTS]
    return [(t.tokens, t.sampled_logprobs, t.weights_versions) for t in made]


@torch.no_grad()
def check(model, engine, version):
    """The log-probabilities are the model's, and every token is of the version."""
    for t in engine.generate(PROMPTS, SAMPLING):
        wanted = [value for value, _ in full_forward(model, t, SAMPLING)]
        np.testing.assert_allclose(t.sampled_logprobs, wanted, atol=NEAR, rtol=0)
        assert {v for v, own in zip(t.weights_versions, t.loss_mask, strict=True) if own} == {version}


def four_requests(decoder):
    for key in range(4):
        decoder.add(key, [5 + key] * 8, seed=key, limit=240)


def whole(decoder):
    """The four requests, to their end."""
    ended, deadline = [], time.monotonic() + 60
    while decoder.running and time.monotonic() < deadline:
        ended += decoder.step()
    assert not decoder.running and [len(row.tokens) for row in ended] == [240] * 4
    return ended


def seconds_of_four_requests(engine):
    decoder, start = ServedDecoder(worker_of(engine).engine, SAMPLING, stop=()), time.monotonic()
    four_requests(decoder)
    whole(decoder)
    return time.monotonic() - start


def update_beside_requests(engine, policy, monkeypatch, *, seconds):
    """How many of four running requests were drawn with the adapter before, and went on with the next one."""
    worker, old = worker_of(engine), engine.weights_version
    decoder, pause = ServedDecoder(worker.engine, SAMPLING, stop=()), worker.engine.pause

    def pause_what_runs():
        four_requests(decoder)
        time.sleep(seconds)
        pause()

    policy.advance_adapter()
    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "pause", pause_what_runs)
        policy.sync_weights(engine)
    ended = whole(decoder)
    assert all(list(row.versions) == sorted(row.versions) for row in ended)
    assert {version for row in ended for version in row.versions} <= {old, old + 1}
    return sum(len(set(row.versions)) == 2 for row in ended)


def test_each_adapter_takes_the_place_of_the_one_before_and_comes_back_after_a_death(model, tokenizer, monkeypatch):
    executor, served = LocalExecutor(), ServedOptions(start_seconds=240)
    source = StateSource(model)
    engine = InferenceEngine(
        lambda: ServedRollout(source, tokenizer, OPTIONS, served), executor=executor, name="rollout"
    ).build()
    worker, policy = worker_of(engine), trainer(model, executor, adapter=True)
    try:
        check(model, engine, 0)
        for version in (1, 2):
            policy.advance_adapter()
            assert policy.sync_weights(engine) == engine.weights_version == version
            check(worker_of(policy).model, engine, version)
        mixed, long = 0, seconds_of_four_requests(engine)
        for part in (0.5, 0.3, 0.7, 0.2, 0.6, 0.4):  # how fast a server draws is not ours to say
            mixed += update_beside_requests(engine, policy, monkeypatch, seconds=part * long)
            if mixed:
                break
        assert mixed and worker.updated.replaced == 0, policy.last_sync.replaced
        wanted = drawn(engine)
        check(worker_of(policy).model, engine, engine.weights_version)
        os.kill(core_of(worker.engine.server.process), signal.SIGKILL)
        again = drawn(engine)
        assert worker.engine.restarts == 1
        assert again == wanted
        with pytest.raises(ValueError, match="takes adapters"):
            policy.sync_weights(engine, adapter=False)
    finally:
        worker.close()
