"""An actor of Ray with an engine of vLLM in it that is killed while it generates: another one draws the same."""

import os
import signal
from functools import partial

import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.rollout.vllm import VLLMOptions
from tests.bridge.rollout.vllm.policies import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(550)]
PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
SAMPLING = SamplingParams(max_new_tokens=60, n=3, seed=4)
OPTIONS = VLLMOptions(max_model_len=96, max_num_seqs=4, kv_cache_gib=0.02, arguments=("block_size=32",))


def drawn(engine):
    found = engine.generate(PROMPTS, SAMPLING)
    return [(t.request_id, t.tokens, t.weights_versions) for t in found], [t.sampled_logprobs for t in found]


def dies_in_the_middle(host, name, steps):
    """The worker's engine draws so many times, and then its process is gone."""
    worker = host.workers[name].module
    step, left = worker._client.step, iter(range(steps))

    def counted():
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    worker._client.step = counted
    return os.getpid()


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")
def test_a_killed_engine_of_vllm_is_opened_again_with_the_proved_weights_and_its_requests(model, tokenizer):
    pytest.importorskip("ray")
    from rl_bridge.executors.ray import RayExecutor
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    executor = RayExecutor(slots=[{"CPU": 1}] * 2, timeout=240, start_timeout=120)
    try:
        executor.call(lambda host: torch.set_num_threads(1), {0: (), 1: ()}, what="threads")
        source = StateSource(model)
        factory = partial(VLLMRollout, source, tokenizer, OPTIONS)
        rollout = InferenceEngine(factory, executor=executor, name="rollout").build()
        policy = TrainEngine(partial(Policy, source, ScoringConfig()), executor=executor, name="policy")
        policy.build(not_colocate_with=[rollout])
        policy.advance(0.1)
        policy.sync_weights(rollout)
        wanted, logprobs = drawn(rollout)
        [killed] = rollout.run(dies_in_the_middle, "rollout", 25)
        found, again = drawn(rollout)
        assert found == wanted, "no request is lost, none is answered twice"
        torch.testing.assert_close(again, logprobs, atol=5e-5, rtol=0)
        assert (rollout.revived, rollout.weights_version) == (1, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(killed, 0)
        # The engine that came back takes updates, each with its proof.
        policy.advance(0.1)
        assert policy.sync_weights(rollout) == rollout.weights_version == 2
        assert drawn(rollout)[0] != wanted
    finally:
        executor.stop()
