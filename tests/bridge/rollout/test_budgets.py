"""Limits of time and tokens: what is unfinished ends by "abort" with the tokens that it has; all else is as before."""

import threading
import time
from dataclasses import replace

import pytest

from rl_bridge.data.trajectory import Budget, SamplingParams, Spending
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import Step
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.conversations import Conversations
from tests.bridge.rollout.sums import DIGITS, EOS, LIMITS, TOKENIZER, converse, openings
from tests.support.simulated_sampler import SimulatedSampler, SimulatedSteps

PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
SAMPLING = SamplingParams(max_new_tokens=40, n=3, seed=4)


def limited(budget, *, delay=lambda number: 0, together=None, room=10**6, server=False):
    steps = SimulatedSteps(delay)
    sampler = SimulatedSampler(DIGITS, EOS, clock=steps, room=room)
    sampler.server = server
    spending = Spending(budget, lambda: steps.now)
    options = {"version": 5, "together": together, "spending": spending}
    talks = Conversations(sampler, steps, TurnTemplate(TOKENIZER), LIMITS, **options)
    return talks.run(openings(12)), steps


def assert_cut(found, wanted):
    """Each is the whole one or its beginning; how many are cut."""
    for t, whole in zip(found, wanted, strict=True):
        t.require_sampled()
        if t.finish_reason == "abort":
            assert t.turns <= whole.turns and t.request_id == whole.request_id
            assert t.tokens == whole.tokens[: len(t.tokens)] or not t.turns
            assert t.logprobs == whole.logprobs[: len(t.tokens)]
            assert t.state_ids in (whole.state_ids[: t.turns], ())
        else:
            assert t == whole
    return sum(t.finish_reason == "abort" for t in found)


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("together", [None, 3])
@pytest.mark.parametrize("seconds", [0.5, 3, 7.5, 12, 30, 1000])
def test_a_call_s_time_ends_conversations_that_draw_think_and_wait(seconds, together, server):
    wanted, *_ = converse(12)
    options = {"delay": lambda number: number % 4 * 5.0, "together": together, "server": server}
    found, steps = limited(Budget(seconds=seconds), **options)
    cut = assert_cut(found, wanted)
    assert steps.now < seconds + 2 and (cut == 0) == (seconds == 1000)


def test_a_conversation_s_time_is_its_own():
    wanted, *_ = converse(12)
    slow = 2
    found, steps = limited(Budget(request_seconds=30), delay=lambda number: 500 if number == slow else 0)
    assert assert_cut(found, wanted) == 1 and found[slow].finish_reason == "abort" and steps.now < 60
    one_by_one, steps = limited(Budget(request_seconds=30), together=1)
    assert assert_cut(one_by_one, wanted) == 0 and steps.now > 60


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("room", [2, 10**6])
@pytest.mark.parametrize("tokens", [1, 20, 60, 10**6])
def test_a_call_s_tokens_are_counted_while_they_are_drawn(tokens, room, server):
    wanted, *_ = converse(12)
    found, _ = limited(Budget(tokens=tokens), room=room, server=server)
    cut = assert_cut(found, wanted)
    drawn = sum(len(t.sampled_tokens) for t in found)
    assert drawn < tokens + 12 * (1 + server) and (cut == 0 or drawn >= tokens) and (cut == 0) == (tokens == 10**6)


@pytest.fixture
def engine(new_model, tokenizer):
    model = new_model(seed=2).requires_grad_(False)
    engine = InferenceEngine(lambda: InProcessRollout(StateSource(model), tokenizer)).build()
    yield engine
    engine.release()


def test_limits_of_a_call_through_the_facade(engine):
    wanted = engine.generate(PROMPTS, SAMPLING)
    whole = sum(len(t.sampled_tokens) for t in wanted)
    for limits, most in (({"tokens": 60}, 60 + 12), ({"tokens": whole + 1}, whole), ({"seconds": 60.0}, whole)):
        found = engine.generate(PROMPTS, SAMPLING, **limits)
        drawn = sum(len(t.sampled_tokens) for t in found)
        assert min(whole, 60) <= drawn <= most
        for t, other in zip(found, wanted, strict=True):
            assert t.tokens == other.tokens[: len(t.tokens)]
            assert t.finish_reason == ("abort" if len(t.tokens) < len(other.tokens) else other.finish_reason)
    for limits in ({"seconds": 1e-6}, {"request_seconds": 1e-6}):
        assert {t.finish_reason for t in engine.generate(PROMPTS, SAMPLING, **limits)} == {"abort"}
        assert {t.finish_reason for t in engine.stream(PROMPTS, SAMPLING, **limits)} == {"abort"}
    for name in ("seconds", "request_seconds", "tokens"):
        with pytest.raises(ValueError, match=f"{name} must be > 0 or None, got 0"):
            engine.generate(PROMPTS, SAMPLING, **{name: 0})


AWAKE = threading.Event()


class Sleeps:
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        AWAKE.wait(1000)
        return Step(done=True)


def test_an_environment_that_sleeps_holds_nobody_up(engine):
    rows, start = [{"prompt": prompt} for prompt in PROMPTS], time.monotonic()
    sampling = replace(SAMPLING, stop=tuple("0123456789+-="))
    try:
        found = engine.converse(rows, sampling, Sleeps, 2, seconds=0.5)
        assert time.monotonic() - start < 120 and len(found) == 12
    finally:
        AWAKE.set()  # a function of the user's that is at work holds what other tests set in this process
    assert {t.finish_reason for t in found} == {"abort"}


def test_a_stream_is_what_generate_gives_and_two_may_be_read_in_turns(engine):
    wanted = {t.request_id: t for t in engine.generate(PROMPTS, SAMPLING)}
    one, two = engine.stream(PROMPTS, SAMPLING), engine.stream(PROMPTS[:2], SAMPLING)
    found = [next(one), next(two), *one, *two]
    of_one = [found[0], *found[2:13]]
    assert len({t.request_id for t in of_one}) == 12 and len(found) == 18
    assert all(wanted[t.request_id].tokens == t.tokens for t in found)


def test_a_stream_that_is_closed_early_frees_its_rows(engine):
    worker = engine.executor._host.workers[engine.name].module
    stream = engine.stream(PROMPTS, SAMPLING)
    first = next(stream)
    [completions] = worker._streams.values()
    decoder = completions._decoder
    assert decoder.running > 0 and first.finish_reason != "abort"
    stream.close()
    assert decoder.running == 0 and decoder.waiting == 0 and not worker._streams
