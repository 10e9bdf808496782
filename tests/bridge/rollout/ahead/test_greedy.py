"""Objectives with a greedy baseline: one more completion of each prompt, which runs ahead and is not trained on."""

import json

import pytest

import rl_fn
from rl_bridge.engines import InferenceEngine
from rl_bridge.functional import from_jax
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.pumps import Pace
from tests.bridge.rollout.ahead.runs import CONFIG, SOURCE, TOKENIZER, Weights, ahead, in_step, shown, steps_of

pytestmark = pytest.mark.long

PARTIAL, WHOLE = Pace(partial=True, rounds=2, steps=2, limit=14), Pace(limit=14, steps=4)
REMAX, STEPS = rl_fn.recipes.remax(), range(CONFIG.steps)


@pytest.fixture
def rollout():
    return InferenceEngine(lambda: InProcessRollout(SOURCE, TOKENIZER)).build()


def run(rollout, *, change=True, **options):
    sampler = ahead(rollout, objective=REMAX, **options)
    made = steps_of(sampler, Weights(change), rollout, STEPS)
    sampler.close()
    return made


def baselines(steps):
    return [sampled.greedy_rewards.tolist() for sampled in steps]


def advantages(steps):
    made = from_jax(rl_fn.remax_advantages)
    return [made(sampled.rewards, sampled.greedy_rewards).tolist() for sampled in steps]


@pytest.mark.parametrize(("pace", "staleness", "change"), [(WHOLE, 0, True), (PARTIAL, 2, False)])
def test_the_baseline_is_that_of_the_synchronous_run(rollout, pace, staleness, change):
    """With nothing ahead, or with weights that stay as they are."""
    here = steps_of(in_step(rollout, objective=REMAX), Weights(change), rollout, STEPS)
    made = run(rollout, pace=pace, staleness=staleness, change=change)
    assert advantages(made) == advantages(here) and baselines(made) == baselines(here)
    assert len({value for step in baselines(made) for value in step}) > 1
    for one, other in zip(shown(made), shown(here), strict=True):
        assert (one.request_id, one.tokens, one.rewards) == (other.request_id, other.tokens, other.rewards)
        # The greedy row lies beside the others, so that their floats may differ in the last bits.
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_greedy_completion_runs_ahead_and_is_not_trained_on(rollout, monkeypatch):
    sampler = ahead(rollout, pace=PARTIAL, staleness=2, objective=REMAX)
    score, together = sampler.rewards.score, []
    monkeypatch.setattr(sampler.rewards, "score", lambda found: (together.append(len(found)), score(found))[1])
    made = steps_of(sampler, Weights(), rollout, STEPS)
    sampler.close()
    assert together == [6, 3] * 5, "a reward may compare what it is given together"
    assert [trajectory.request_id[-1] for trajectory in shown(made)] == [0, 1] * 15
    assert sampler._ledger.finished == {"trained": 30, "compared": 15}
    assert made[3].ahead["staleness_max"] > 0 and all(sampled.rewards.shape == (3, 2) for sampled in made)


def test_resumed_after_each_step_it_is_the_same_run(rollout):
    whole = run(rollout, pace=PARTIAL, staleness=2)
    state, found = None, []
    for step in STEPS:
        sampler, policy = ahead(rollout, pace=PARTIAL, staleness=2, objective=REMAX), Weights()
        if state is not None:
            sampler.load_checkpoint_state(json.loads(state))
        policy.step = step
        found += steps_of(sampler, policy, rollout, [step])
        state = json.dumps(sampler.checkpoint_state())
        sampler.close()
    assert shown(found) == shown(whole) and baselines(found) == baselines(whole)
