"""Conversations that run ahead of training: on a real model, with updates, kills, lost environments between turns."""

import json
import threading
import time
from dataclasses import replace

import pytest

import rl_fn
from rl_bridge.data.rows import RowStream
from rl_bridge.data.token_batch import collate
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import Step
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rewards import load
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.environment_turns import Talking, Talks
from rl_bridge.rollout.ahead.ledger import Group, Sample, Turn
from rl_bridge.rollout.ahead.pumps import Pace
from rl_bridge.rollout.conversations import Limits, Opening
from tests.bridge.rollout.ahead.runs import (
    CONFIG,
    ROWS,
    SOURCE,
    TOKENIZER,
    Weights,
    ahead,
    full_logprobs,
    shown,
    steps_of,
)
from tests.support.plain_sampler import PlainSampler

PARTIAL = Pace(partial=True, rounds=2, steps=2, limit=6)
WHOLE = Pace(limit=6, steps=4)
FREE = Pace(partial=True, deterministic=False, steps=1, limit=6)
STEPS = range(CONFIG.steps)
OF_TURNS = replace(CONFIG, sampling=replace(CONFIG.sampling, max_new_tokens=6))


class Counts:
    """Answers with the number of characters so far; ends at the third answer."""

    seconds = 0.0

    def reset(self, row):
        self.answers = 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        time.sleep(self.seconds)
        self.answers += 1
        said = sum(len(message["content"]) for message in messages)
        answer = [{"role": "tool", "content": f"={said}+"}]
        return Step(messages=answer, reward=float(said), done=self.answers == 3, state_id=self.answers)


def slow(seconds):
    return type("Slow", (Counts,), {"seconds": seconds})


# A turn ends at one of five tokens: an untrained model says one of them soon enough.
STOPS = [TOKENIZER.eos_token_id, *TOKENIZER.convert_tokens_to_ids(["0", "3", "7", "+"])]


class Rollout(InProcessRollout):
    def __init__(self, **options):
        super().__init__(SOURCE, TOKENIZER, **options)
        self._stop = frozenset(STOPS)


@pytest.fixture
def rollout():
    return InferenceEngine(Rollout).build()


def talking(environment=Counts, **options):
    limits = Limits(max_turns=4, turn_tokens=6, all_tokens=60)
    return Talking(environment=environment, limits=limits, template=TurnTemplate(TOKENIZER, STOPS), **options)


@pytest.fixture
def run(rollout):
    made = []

    def run(steps=STEPS, beside=0.0, environment=Counts, engine=None, **options):
        engine = engine or rollout
        sampler = ahead(engine, reward=load(("environment",)), config=OF_TURNS, talking=talking(environment), **options)
        made.append(sampler)
        return steps_of(sampler, Weights(), engine, steps, beside)

    yield run
    for sampler in made:
        sampler.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rl_bridge ")]


@pytest.fixture(scope="module")
def whole():
    """What a run in pieces, two steps ahead, trains on when nothing disturbs it."""
    engine = InferenceEngine(Rollout).build()
    given = {"reward": load(("environment",)), "config": OF_TURNS, "talking": talking()}
    sampler = ahead(engine, pace=PARTIAL, staleness=2, **given)
    made = shown(steps_of(sampler, Weights(), engine, STEPS))
    sampler.close()
    return made


def resumed_each_step(rollout, environment):
    """What the steps train on, each of them in a run of its own that goes on with the last one's checkpoint."""
    states, found = [], []
    for step in STEPS:
        given = {"reward": load(("environment",)), "config": OF_TURNS, "talking": talking(environment)}
        sampler, policy = ahead(rollout, pace=PARTIAL, staleness=2, **given), Weights()
        if states:
            sampler.load_checkpoint_state(states[-1])
        policy.step = step
        found += steps_of(sampler, policy, rollout, [step])
        states.append(json.loads(json.dumps(sampler.checkpoint_state())))
        sampler.close()
    return found, states


@pytest.mark.long
@pytest.mark.parametrize(("pace", "staleness"), [(PARTIAL, 2), (WHOLE, 1), (FREE, 2)])
def test_each_token_of_each_turn_has_the_logprob_of_the_version_that_drew_it(run, pace, staleness):
    made, mixed, turns = run(pace=pace, staleness=staleness), 0, 0
    for step, sampled in enumerate(made):
        collate(sampled.trajectories, 0)
        for trajectory in sampled.trajectories:
            trajectory.require_sampled()
            places = [place for place, drawn in enumerate(trajectory.loss_mask) if drawn]
            versions = [trajectory.weights_versions[place] // 10 for place in places]
            assert versions == sorted(versions) and all(0 <= step - version <= staleness for version in versions)
            full = {version: full_logprobs(version, trajectory) for version in set(versions)}
            for place, version in zip(places, versions, strict=True):
                assert abs(float(full[version][place - 1]) - trajectory.logprobs[place]) < 1e-5
            mixed += len(set(versions)) > 1
            turns += trajectory.turns
            assert trajectory.rewards == {"environment": sum(trajectory.turn_rewards)}
    assert turns > 1.3 * len(shown(made))
    assert (mixed > 3) if pace is PARTIAL else (mixed == 0 or pace is FREE)


@pytest.mark.long
def test_nothing_ahead_is_the_synchronous_run(run, rollout):
    """Each prompt's greedy conversation among the others."""
    remax = rl_fn.recipes.remax()

    def converse(rows, sampling):
        return rollout.converse(rows, sampling, Counts, 4, max_tokens=60)

    sampler = PlainSampler(converse, load(("environment",)), RowStream(ROWS, 3), remax, OF_TURNS, 5)
    here, found = steps_of(sampler, Weights(), rollout, STEPS), run(pace=WHOLE, staleness=0, objective=remax)
    baselines = [[sampled.greedy_rewards.tolist() for sampled in made] for made in (found, here)]
    assert baselines[0] == baselines[1] and len({tuple(step) for step in baselines[0]}) > 1
    for one, other in zip(shown(found), shown(here), strict=True):
        # Rows lie beside others, so that their floats may differ in the last bit.
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert replace(one, logprobs=other.logprobs) == other


@pytest.mark.long
def test_the_same_run_whatever_environment_is_slow(run, whole):
    assert shown(run(pace=PARTIAL, staleness=2, environment=slow(0.004))) == whole
    assert shown(run(pace=PARTIAL, staleness=2, beside=0.02)) == whole


def test_a_checkpoint_between_two_turns_goes_on_with_environments_that_hear_all_again(rollout, whole):
    found, states = resumed_each_step(rollout, Counts)
    samples = [sample for state in states for group in state["ledger"]["groups"] for sample in group["samples"]]
    between = sum(len(sample["turns"]) > 1 and sample["state"] in ("waiting", "asking") for sample in samples)
    assert between > 2, "no checkpoint was between two turns"
    assert shown(found) == whole


def test_an_environment_that_answers_otherwise_the_second_time_begins_its_conversation_anew(rollout, caplog):
    class Random(Counts):
        made = 0

        def reset(self, row):
            Random.made += 1
            self.mine = Random.made
            return super().reset(row)

        def step(self, messages):
            step = super().step(messages)
            return replace(step, reward=float(self.mine))

    found, _ = resumed_each_step(rollout, Random)
    assert "begins anew" in caplog.text
    for trajectory in shown(found):
        answered = [reward for reward in trajectory.turn_rewards if reward]
        assert len(set(answered)) <= 1, "a conversation with two environments"
    ids = [trajectory.request_id for trajectory in shown(found)]
    assert len(set(ids)) == len(ids) == CONFIG.steps * 6


class Minus(Counts):
    """Another environment: what Counts gives it takes."""

    def step(self, messages):
        step = super().step(messages)
        return replace(step, reward=-step.reward)


OTHERS = {
    "prompts": ([row | {"prompt": f"{place}{place}="} for place, row in enumerate(ROWS)], {}, "their rows, or "),
    "answers": ([row | {"answer": "7"} for row in ROWS], {}, "their rows, or "),
    "environment": (ROWS, {"environment": Minus}, "environment was Counts:"),
    "turns": (ROWS, {"limits": Limits(max_turns=2, turn_tokens=6, all_tokens=60)}, "max_turns was 4 and is 2"),
    "tokens": (ROWS, {"limits": Limits(max_turns=4, turn_tokens=6, all_tokens=30)}, "max_tokens was 60 and is 30"),
}


@pytest.mark.long
@pytest.mark.parametrize("pace", [PARTIAL, FREE])
@pytest.mark.parametrize("change", OTHERS)
def test_conversations_ahead_are_held_again_where_rows_or_environments_are_others(
    rollout, monkeypatch, capsys, change, pace
):
    """Those that had ended went on with their old turns beside new ones of the same group, of another prompt."""
    rows, options, line = OTHERS[change]
    given = {"reward": load(("environment",)), "config": OF_TURNS, "pace": pace, "staleness": 2}
    sampler = ahead(rollout, talking=talking(), **given)
    steps_of(sampler, Weights(), rollout, range(2))
    state = json.loads(json.dumps(sampler.checkpoint_state()))
    sampler.close()
    samples = [sample for group in state["ledger"]["groups"] for sample in group["samples"]]
    assert any(sample["turns"] for sample in samples)
    monkeypatch.setattr("tests.bridge.rollout.ahead.runs.ROWS", rows)
    held = replace(talking(), **options)
    rollout, policy = InferenceEngine(Rollout).build(), Weights()  # a run has an engine of its own
    sampler = ahead(rollout, talking=held, **given)
    sampler.load_checkpoint_state(state)
    assert f"prompts that were ahead of step 2 are drawn again: {line}" in capsys.readouterr().out
    policy.step = 2
    made = steps_of(sampler, policy, rollout, STEPS[2:])
    sampler.close()
    sign = -1 if change == "environment" else 1
    for step in made:
        for place, trajectory in enumerate(step.trajectories):
            assert trajectory.row in rows and trajectory.row == step.trajectories[place // 2 * 2].row
            assert TOKENIZER.decode(trajectory.tokens).lstrip().startswith(trajectory.row["prompt"])
            assert all(sign * reward >= 0 for reward in trajectory.turn_rewards if reward is not None)
            assert trajectory.turns <= held.limits.max_turns and len(trajectory.tokens) <= held.limits.all_tokens


@pytest.mark.parametrize("turns", range(4))
def test_a_conversation_that_is_aborted_before_a_turn_s_first_token_has_the_turns_before(turns):
    asked = [
        Turn([{"role": "user", "content": "1="}], 1.0 * place, False, place, room=6, drawn=int(place < turns))
        for place in range(turns + 1)
    ]
    drawn = {"tokens": STOPS[1:2] * turns, "logprobs": [-1.0] * turns, "spans": [(0, turns)] if turns else []}
    sample = Sample(0, reason="abort", turns=asked, **drawn)
    talk = talking().conversation(Opening(request_id=(0, 0), seed=0, row={"prompt": "1="}), sample)
    trajectory = talk.trajectory("abort", TOKENIZER.eos_token_id)
    assert trajectory.turns == turns and trajectory.state_ids == tuple(range(turns))
    assert trajectory.turn_rewards == tuple(1.0 * place for place in range(1, turns + 1))


def test_environments_that_fail_take_no_part_and_all_of_them_end_the_run(run):
    class Fails(Counts):
        def step(self, messages):
            if messages[0]["content"].startswith(("1", "2")):
                raise ZeroDivisionError("in the tool")
            return super().step(messages)

    made = shown(run(pace=WHOLE, staleness=1, environment=Fails))
    failed = [t for t in made if t.row["prompt"][0] in "12" and t.finish_reason != "length"]
    assert failed and all(t.finish_reason == "error" and t.turns == 1 for t in failed)
    assert all(t.finish_reason != "error" for t in made if t not in failed)

    class Broken(Counts):
        def reset(self, row):
            raise ZeroDivisionError("in the tool")

    with pytest.raises(ValueError, match=r"failed in all 6 conversations of step 0; row \d.*ZeroDivisionError"):
        run(pace=WHOLE, staleness=1, environment=Broken)


class Loops(Counts):
    """Never answers rows that begin with 3; in a process of its own, which is ended."""

    def step(self, messages):
        while messages[0]["content"].startswith("3"):
            pass
        return super().step(messages)


@pytest.mark.slow
def test_an_environment_that_loops_is_ended_in_its_process_and_nobody_waits_longer(rollout):
    given = talking(Loops, step_timeout=0.5, processes=6)
    sampler = ahead(rollout, reward=load(("environment",)), config=OF_TURNS, talking=given, pace=FREE, staleness=1)
    made = shown(steps_of(sampler, Weights(), rollout, STEPS))
    sampler.close()
    looped = [t for t in made if t.finish_reason == "error"]
    assert looped and all(t.row["prompt"].startswith("3") for t in looped)
    assert len(made) == CONFIG.steps * 6


def test_an_environment_that_is_asked_is_not_ended_and_the_end_waits_for_all(rollout):
    entered, go, closed = threading.Event(), threading.Event(), []

    class Closing(Counts):
        def reset(self, row):
            self.name = row["prompt"]
            if self.name == "1":
                entered.set()
                assert go.wait(30)
            return super().reset(row)

        def close(self):
            time.sleep(0.2)
            closed.append(self.name)

    def opening(group, place):
        return Opening(request_id=(group.number, place), seed=0, row={"prompt": group.prompt})

    talks = Talks(talking(Closing), opening)
    groups = [Group(number, str(number), [Sample(0)], 0) for number in range(2)]
    try:
        talks.ask(groups[0], 0)
        assert [reply.key for reply in talks.replies()] == [(0, 0)]
        talks.ask(groups[1], 0)
        assert entered.wait(30)
        talks.keep(())
        assert talks.replies() == [] and closed == ["0"]
        time.sleep(0.3)
        assert closed == ["0"]
        go.set()
        assert [reply.key for reply in talks.replies()] == [(1, 0)] and not talks.busy
    finally:
        go.set()
        talks.close()
    assert closed == ["0", "1"]
