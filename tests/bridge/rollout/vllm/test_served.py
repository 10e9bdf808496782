"""A real server of vLLM behind the facade: one process for the module, and a second one after the first was killed."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import Step
from rl_bridge.executors.session import LocalExecutor
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.models.model_source import StateSource
from rl_bridge.rollout.ahead.pumps import Row
from rl_bridge.rollout.served.served_rollout import ServedRollout
from rl_bridge.rollout.served.vllm_server import ServedOptions
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from tests.bridge.rollout.stopped import assert_cut_at_the_text
from tests.bridge.rollout.vllm.policies import trainer
from tests.bridge.rollout.vllm.served_core import core_of, full_forward

pytestmark = pytest.mark.vllm
PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
OPTIONS = VLLMOptions(max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25)
SAMPLING = SamplingParams(max_new_tokens=12, n=3, seed=4)


class Counts:
    """Says how many turns there were, and ends after three."""

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return Step(messages=[{"role": "tool", "content": f"-{turns}-"}], reward=1.0, done=turns == 3)


@pytest.fixture(scope="module")
def parts(model, tokenizer, tmp_path_factory):
    """The engine of the facade, its worker, a trainer of the same weights, and the server's log."""
    log = tmp_path_factory.mktemp("served") / "log"
    executor = LocalExecutor()

    def worker():
        return ServedRollout(StateSource(model), tokenizer, OPTIONS, ServedOptions(log=str(log), start_seconds=240))

    engine = InferenceEngine(worker, executor=executor, name="rollout").build()
    made = executor._host.workers[engine.name].module
    yield engine, made, trainer(model, executor), log
    made.close()
    assert made.engine.server.process.dead.is_set() and not made.engine.server.home.exists()


@torch.no_grad()
def check(model, trajectories, sampling, version):
    for t in trajectories:
        t.require_sampled()
        wanted = full_forward(model, t, sampling)
        np.testing.assert_allclose(t.sampled_logprobs, [value for value, _ in wanted], atol=5e-5)
        assert {v for v, drawn in zip(t.weights_versions, t.loss_mask, strict=True) if drawn} == {version}
        if sampling.top_k or sampling.top_p or sampling.min_p:
            allowed = [list(ids) for ids, drawn in zip(t.allowed_tokens, t.loss_mask, strict=True) if drawn]
            assert allowed == [ids for _, ids in wanted]
        else:
            assert t.allowed_tokens is None


@pytest.mark.parametrize(
    "cuts",
    [{}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_tokens_come_with_what_they_were_drawn_with(parts, model, cuts):
    engine, *_ = parts
    sampling = replace(SAMPLING, **cuts)
    made = engine.generate(PROMPTS, sampling)
    assert [t.request_id for t in made] == [(4, place, n) for place in range(4) for n in range(3)]
    check(model, made, sampling, 0)
    assert collate(made, 0).mask.sum() == sum(len(t.sampled_tokens) for t in made)
    assert {t.finish_reason for t in made} <= {"stop", "length"} and len({t.tokens for t in made}) > 9
    again = engine.generate(PROMPTS[:2], sampling)
    assert [t.tokens for t in again] == [t.tokens for t in made[:6]], "whatever else runs"


def test_an_engine_in_the_process_draws_the_same_tokens(parts, model, tokenizer):
    """The same requests and seeds, whole and cut."""
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    served, *_ = parts
    samplings = SAMPLING, replace(SAMPLING, temperature=0.8, top_k=12, top_p=0.95, min_p=0.02)
    worker = VLLMRollout(StateSource(model), tokenizer, OPTIONS)
    try:
        engine = InferenceEngine(lambda: worker, executor=LocalExecutor(), name="own").build()
        for sampling in samplings:
            for ours, theirs in zip(
                engine.generate(PROMPTS, sampling), served.generate(PROMPTS, sampling), strict=True
            ):
                assert (ours.request_id, ours.tokens) == (theirs.request_id, theirs.tokens)
                np.testing.assert_allclose(ours.sampled_logprobs, theirs.sampled_logprobs, atol=5e-5)
    finally:
        worker.close()


@pytest.mark.parametrize("piece", [3, 64])
def test_a_stop_text_cuts_behind_the_token_that_completed_it(parts, tokenizer, monkeypatch, piece):
    """However many tokens a request of a row draws."""
    engine, *_ = parts
    monkeypatch.setattr("rl_bridge.rollout.served.served_engine.PIECE", piece)
    stop, sampling = ("1", "a", "= "), replace(SAMPLING, top_p=0.9)
    found = engine.generate(PROMPTS, replace(sampling, stop=stop))
    assert_cut_at_the_text(tokenizer, engine.generate(PROMPTS, sampling), found, stop)


def test_rows_that_end_between_two_commands_are_over_and_rounds_draw_the_same(parts, tokenizer):
    """ROLL-1, ROLL-2: what the simulated server of rollouts ahead of training does, on a real one."""
    _, worker, *_ = parts
    prompts = [tuple(encode_prompt(tokenizer, PROMPTS[number % 4])) for number in range(12)]
    rows = [Row((number, 0), prompt, (), 0, 0, seed=number, limit=40) for number, prompt in enumerate(prompts)]
    ended, deadline = worker.advance(rows, SAMPLING, 1), time.monotonic() + 60
    while worker.engine._running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended += worker.withdraw([row.key for row in rows])
    assert len(ended) == 12 and {row.reason for row in ended} == {"stop", "length"}
    for row in ended:
        stops = [place for place, token in enumerate(row.drawn.tokens, 1) if token in worker._stop]
        assert stops == ([len(row.drawn.tokens)] if row.reason == "stop" else []), "tokens behind an end"
        assert row.reason == "stop" or len(row.drawn.tokens) == 40
    found = worker.advance(rows, SAMPLING, 7, True)
    while len(found) < 12:
        found += worker.advance([], SAMPLING, 7, True)
    assert {r.key: (r.reason, r.drawn.tokens) for r in found} == {r.key: (r.reason, r.drawn.tokens) for r in ended}


def test_conversations_go_on_in_the_server(parts, model):
    engine, *_ = parts
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    found = engine.converse(rows, replace(SAMPLING, max_new_tokens=24), Counts, 3)
    check(model, found, SAMPLING, 0)
    assert len(found) == 12 and all(t.rewards == {"environment": float(t.answers)} for t in map(Answered, found))


class Answered:
    """Turns that the environment answered."""

    def __init__(self, t):
        self.rewards, self.answers = t.rewards, t.turns - (t.finish_reason == "length")


def test_a_proved_update_and_then_a_death(parts, model, tokenizer):
    engine, worker, policy, log = parts
    first = worker.engine.server.process
    policy.advance(0.1)
    policy.sync_weights(engine)
    assert engine.weights_version == 1 and worker.updated.replaced == 0
    trained = policy.executor._host.workers[policy.name].module.model
    sampling = replace(SAMPLING, max_new_tokens=200)
    wanted = engine.generate(PROMPTS, sampling)
    check(trained, wanted, sampling, 1)
    assert [t.tokens for t in engine.generate(PROMPTS, sampling)] == [t.tokens for t in wanted]
    # A process that is stopped ends no request, so that no machine is too fast for the death.
    os.kill(core_of(first), signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (core_of(first), signal.SIGKILL)).start()
    found = engine.generate(PROMPTS, sampling)
    assert worker.engine.restarts == 1 and engine.weights_version == 1
    assert [t.tokens for t in found] == [t.tokens for t in wanted], "no request was lost, none changed"
    check(trained, found, sampling, 1)
    assert first.dead.is_set() and worker.engine.server.process is not first
    assert "EngineCore" in log.read_text()
