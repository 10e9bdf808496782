"""Rollouts ahead of training on a real model: exact log-probabilities, the same run twice, limits, a dead engine."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.engines import InferenceEngine
from rl_bridge.rewards import RewardError, load
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.ledger import Ledger, loaded, saved
from rl_bridge.rollout.ahead.pumps import Pace
from rl_bridge.rollout.rollout_worker import EngineDied
from tests.bridge.rollout.ahead.runs import (
    CONFIG,
    SOURCE,
    TOKENIZER,
    Weights,
    ahead,
    digits,
    full_logprobs,
    in_step,
    shown,
    steps_of,
)

PARTIAL = Pace(partial=True, rounds=2, steps=2, limit=14)
WHOLE = Pace(limit=14, steps=4)
FREE = Pace(partial=True, deterministic=False, steps=1, limit=14)
STEPS = range(CONFIG.steps)


@pytest.fixture
def rollout():
    return InferenceEngine(lambda: InProcessRollout(SOURCE, TOKENIZER)).build()


@pytest.fixture
def run(rollout):
    """Run all steps; the sampler is closed at the end of the test."""
    made = []

    def run(steps=STEPS, beside=0.0, engine=None, **options):
        engine = engine or rollout
        sampler = ahead(engine, **options)
        made.append(sampler)
        return steps_of(sampler, Weights(), engine, steps, beside)

    yield run
    for sampler in made:
        sampler.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "rl_bridge rollouts"]


@pytest.mark.parametrize(("pace", "staleness"), [(PARTIAL, 2), (WHOLE, 1), (FREE, 2)])
def test_each_token_has_the_logprob_of_the_version_that_drew_it(run, pace, staleness):
    made, mixed, apart = run(pace=pace, staleness=staleness), 0, []
    for step, sampled in enumerate(made):
        assert [t.group for t in sampled.trajectories] == [0, 0, 1, 1, 2, 2]
        collate(sampled.trajectories, 0)
        for trajectory in sampled.trajectories:
            versions = [
                v // 10 for v, drawn in zip(trajectory.weights_versions, trajectory.loss_mask, strict=True) if drawn
            ]
            assert versions == sorted(versions) and all(0 <= step - version <= staleness for version in versions)
            mixed += len(set(versions)) > 1
            full = {version: full_logprobs(version, trajectory) for version in {*versions, *range(CONFIG.steps)}}
            start = len(trajectory.prompt_tokens)
            for place, (version, logprob) in enumerate(zip(versions, trajectory.sampled_logprobs, strict=True)):
                assert abs(float(full[version][start + place - 1]) - logprob) < 1e-5
                apart += [abs(float(full[other][start + place - 1]) - logprob) for other in full if other != version]
            assert trajectory.rewards == {"reward": digits(trajectory.completion, {})}
    # Another version's would be seen.
    assert sum(difference > 1e-3 for difference in apart) > 0.95 * len(apart)
    if pace is PARTIAL:
        assert mixed > 5
        assert made[3].ahead["versions_per_completion"] > 1 and 0 < made[3].ahead["staleness"] <= 2
    if pace is WHOLE:
        assert mixed == 0 and [sampled.ahead["staleness"] for sampled in made] == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_nothing_ahead_is_the_synchronous_run_bit_for_bit(run, rollout):
    here = steps_of(in_step(rollout), Weights(), rollout, STEPS)
    assert shown(run(pace=WHOLE, staleness=0)) == shown(here)


def test_an_update_that_changes_nothing_changes_nothing(rollout):
    """A completion that goes on draws with the random numbers that it would have drawn with."""
    sampler = ahead(rollout, pace=PARTIAL, staleness=2)
    made = shown(steps_of(sampler, Weights(change=False), rollout, STEPS))
    sampler.close()
    here = shown(steps_of(in_step(rollout), Weights(change=False), rollout, STEPS))
    assert [one.tokens for one in made] == [other.tokens for other in here]
    assert sum(len({*one.weights_versions} - {-1}) > 1 for one in made) > 3
    for one, other in zip(made, here, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.long
def test_the_same_seed_is_the_same_run_whatever_takes_how_long(run):
    def slow(completion, row):
        time.sleep(0.002 * len(completion))
        return digits(completion, row)

    first = shown(run(pace=PARTIAL, staleness=2))
    assert shown(run(pace=PARTIAL, staleness=2, reward=slow)) == first
    assert shown(run(pace=PARTIAL, staleness=2, beside=0.03)) == first


def named(completion, row):
    return {"even": digits(completion, row), "short": -float(len(completion))}


REWARDS = {
    "a function": lambda: load(digits),
    "a function of two": lambda: load(named, weights=[1.0, 0.5]),
    "two, of which one is two": lambda: load(["exact", named], weights=[2.0, 1.0, 0.5]),
}


@pytest.mark.long
@pytest.mark.parametrize("reward", REWARDS)
def test_a_checkpoint_between_any_two_steps_goes_on_as_if_nothing_had_been(run, rollout, reward):
    """Also where the rewards of the next step are in the checkpoint, and none was asked for since."""
    steps = run(pace=PARTIAL, staleness=2, reward=REWARDS[reward]())
    whole = shown(steps)
    state, found = None, []
    for step in STEPS:
        sampler, policy = ahead(rollout, pace=PARTIAL, staleness=2, reward=REWARDS[reward]()), Weights()
        if state is not None:
            sampler.load_checkpoint_state(json.loads(state))
        policy.step = step
        found += steps_of(sampler, policy, rollout, [step])
        state = json.dumps(sampler.checkpoint_state())
        sampler.close()
    assert shown(found) == whole
    for one, other in zip(found, steps, strict=True):
        assert one.names == other.names and torch.equal(one.matrix, other.matrix)
        assert torch.equal(one.rewards, other.rewards)


def unfinished(ledger):
    """A sample of the last prompt, with its first five tokens alone."""
    samples = ledger["groups"][-1]["samples"]
    for sample in samples:
        sample.update(state="rewarding", rewards={})
    cut = next(sample for sample in samples if len(sample["tokens"]) > 5)
    assert TOKENIZER.eos_token_id not in cut["tokens"][:5]
    first = {name: cut[name][:5] for name in ("tokens", "logprobs")}
    cut.update(first, spans=[[cut["spans"][0][0], 5]], state="waiting", reason=None)
    return cut


def test_a_row_that_an_older_checkpoint_has_behind_its_end_is_over_or_refused_by_name(rollout):
    """ROLL-1: full rows ended every resume with "limit 0", those behind their stop token were drawn on."""
    before = ahead(rollout, pace=PARTIAL, staleness=2)
    steps_of(before, Weights(), rollout, [0])
    state = json.dumps(before.checkpoint_state())
    before.close()

    def resumed(*more):
        sampler, policy, changed = ahead(rollout, pace=PARTIAL, staleness=2), Weights(), json.loads(state)
        sample = unfinished(changed["ledger"])
        sample["tokens"] += more
        sample["logprobs"] += [-1.0] * len(more)
        sample["spans"][-1][1] += len(more)
        sampler.load_checkpoint_state(changed)
        policy.step = 1
        try:
            made = shown(steps_of(sampler, policy, rollout, range(1, CONFIG.steps)))
        finally:
            sampler.close()
        return next(t for t in made if t.sampled_tokens[: len(sample["tokens"])] == tuple(sample["tokens"])), sample

    end = TOKENIZER.eos_token_id
    stopped, sample = resumed(end)
    assert (list(stopped.sampled_tokens), stopped.finish_reason) == (sample["tokens"], "stop")
    full, sample = resumed(*[5] * 9)
    assert (list(full.sampled_tokens), full.finish_reason) == (sample["tokens"], "length")
    with pytest.raises(ValueError, match=rf"sample \d of prompt \d has 2 tokens behind its stop token {end}: an older"):
        resumed(end, 5, 5)


class Mortal(InProcessRollout):
    """Dies in rounds of its life; the next one has no weights worth anything."""

    def __init__(self, deaths, **options):
        super().__init__(SOURCE, TOKENIZER, **options)
        self.deaths, self.rounds, self.dead, self.lives = set(deaths), 0, False, 1

    def advance(self, rows, sampling, steps, exactly=False):
        self.rounds += 1
        if self.dead or self.rounds in self.deaths:
            self.dead = True
            raise EngineDied("it was killed")
        return super().advance(rows, sampling, steps, exactly)

    def restart(self):
        super().restart()
        self.dead, self.lives = False, self.lives + 1
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.zero_()


def test_a_checkpoint_between_whose_prompts_some_are_trained_on_gives_each_its_own_row(rollout):
    """A step may pass over a slow prompt: the rows of the later ones still count."""
    ledger, rows = Ledger(), [f"{number}+1=" for number in range(4)]
    for number, prompt in enumerate(rows):
        ledger.open(prompt, [number], 0)
    for number in (1, 2):
        ledger.taken.add(ledger.groups.pop(number).number)
    state = json.loads(json.dumps(saved(ledger)))
    again = loaded(state, rows.__getitem__)
    assert (again.taken, again.opened, list(again.groups)) == ({1, 2}, 4, [0, 3])
    assert saved(again) == saved(ledger)
    sampler, wanted = (ahead(rollout, pace=FREE, staleness=2) for _ in range(2))
    places = {number: wanted._prompt(number)[0] for number in range(4)}
    stream = ahead(rollout, pace=FREE, staleness=2).stream.checkpoint_state()
    sampler.load_checkpoint_state({"ledger": state, "step": 0, "weights": [], "stream": stream})
    assert {number: group.prompt for number, group in sampler._ledger.groups.items()} == {0: places[0], 3: places[3]}


def test_an_engine_that_dies_is_replaced_and_no_request_is_lost_or_answered_twice(run):
    """The trainer waits, so the new engine has the weights of the old one: the tokens are those of a quiet run."""
    mortal = InferenceEngine(lambda: Mortal([1, 3, 4, 9])).build()
    disturbed, quiet = shown(run(pace=WHOLE, staleness=0, engine=mortal)), shown(run(pace=WHOLE, staleness=0))
    # Rows that were drawn again lie beside others, so that their floats may differ in the last bit.
    for one, other in zip(disturbed, quiet, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert replace(one, logprobs=other.logprobs) == other
    [lives] = mortal.run(lambda host, name: host.workers[name].module.lives, mortal.name)
    assert lives == 5


def test_an_engine_that_dies_while_the_trainer_works_goes_on_with_its_next_weights(run):
    mortal = InferenceEngine(lambda: Mortal([2, 5, 11])).build()
    made = run(pace=FREE, staleness=2, engine=mortal, beside=0.02)
    ids = [trajectory.request_id for sampled in made for trajectory in sampled.trajectories]
    assert len(set(ids)) == len(ids) == CONFIG.steps * 6
    for sampled in made:
        for trajectory in sampled.trajectories:
            versions = [v // 10 for v in trajectory.weights_versions if v >= 0]
            full = {version: full_logprobs(version, trajectory) for version in versions}
            start = len(trajectory.prompt_tokens)
            wanted = [float(full[version][start + place - 1]) for place, version in enumerate(versions)]
            assert trajectory.sampled_logprobs == pytest.approx(wanted, abs=1e-5)


def test_an_engine_that_dies_again_and_again_ends_the_run(run):
    mortal = InferenceEngine(lambda: Mortal(range(100))).build()
    with pytest.raises(EngineDied, match="it was killed"):
        run(pace=WHOLE, staleness=1, engine=mortal)


def test_an_error_of_the_engine_is_the_run_s(run, monkeypatch):
    def broken(self, *given):
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr(InProcessRollout, "advance", broken)
    with pytest.raises(ZeroDivisionError, match="in the model"):
        run(pace=WHOLE, staleness=1)


def test_a_completion_that_takes_too_long_is_aborted_and_counts_nothing(run, monkeypatch):
    advance = InProcessRollout.advance
    monkeypatch.setattr(InProcessRollout, "advance", lambda self, *given: (time.sleep(0.01), advance(self, *given))[1])
    [sampled] = run([0], pace=replace(FREE, seconds=0.05), staleness=1)
    aborted = [t for t in sampled.trajectories if t.finish_reason == "abort"]
    assert aborted and all(0 < len(t.sampled_tokens) < 14 for t in aborted)
    assert sampled.ahead["aborted"] == len(aborted) / 6
    with pytest.raises(ValueError, match="not deterministic"):
        replace(WHOLE, seconds=1.0)


@pytest.mark.long
@pytest.mark.parametrize(("pace", "staleness"), [(PARTIAL, 2), (WHOLE, 1)])
def test_a_reward_of_lists_has_the_calls_of_a_synchronous_run(run, rollout, pace, staleness):
    """ROLL-12: there were as many as prompts. In free runs a call has all that wait: the simulation says so."""
    calls = []

    def lists(trajectories):
        calls.append([trajectory.request_id for trajectory in trajectories])
        return [digits(trajectory.completion, trajectory.row) for trajectory in trajectories]

    run(pace=pace, staleness=staleness, reward=lists)
    ahead_of_time, calls = calls, []
    synchronous = in_step(rollout)
    synchronous.rewards = load(lists)
    steps_of(synchronous, Weights(), rollout, STEPS)
    assert ahead_of_time == calls and len(calls) == CONFIG.steps


def test_a_reward_that_never_ends_is_killed_in_its_process_and_ends_the_run(rollout, tmp_path):
    (tmp_path / "reward.py").write_text("def forever(completion, row):\n    while True:\n        pass\n")
    sampler = ahead(rollout, pace=WHOLE, staleness=1)
    sampler.rewards = load((f"{tmp_path / 'reward.py'}:forever",), timeout=0.3)
    with pytest.raises(RewardError, match=r"reward forever on row \d did not end within 0.3 s"):
        steps_of(sampler, Weights(), rollout, STEPS)
    sampler.close()


def test_a_wait_without_any_progress_names_what_it_waited_for(rollout):
    stop = threading.Event()
    sampler = ahead(rollout, pace=WHOLE, staleness=1, reward=lambda completion, row: float(stop.wait(20)), patience=0.5)
    with pytest.raises(TimeoutError, match=r"waited 0.5 s for the completions of step 0: .*'rewarding': 12"):
        steps_of(sampler, Weights(), rollout, STEPS)
    stop.set()
    sampler.close()


def test_what_belongs_to_one_step_does_not_run_ahead(rollout):
    with pytest.raises(ValueError, match=r"a window of 5 prompts, 3 a step, needs max_staleness ≥ 2, got 1"):
        ahead(rollout, pace=FREE, staleness=1, window=5)
