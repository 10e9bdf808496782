"""Rollouts ahead of training in a loop: the plain loop's numbers without staleness, and the same ones when resumed."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

import rl_fn
from examples import ahead
from rl_bridge import (
    NLL,
    AdamW,
    Ahead,
    Policy,
    Rollout,
    RolloutOptions,
    Run,
    SamplingParams,
    Turns,
    current_executor,
    load_model,
    load_rows,
)
from rl_bridge.environments import Step
from tests.support.results import metrics

pytestmark = pytest.mark.long

SIZES = {"steps": 3, "prompts": 4, "n": 4, "max_new_tokens": 5, "lr": 0.02}


def longer(completion, row):
    """A reward that a model without a clue earns."""
    return len(completion) + 0.1 * completion.count("1")


@pytest.fixture
def run_here(ended, model_folder, problems, tmp_path, monkeypatch):
    """Run the example in this process; the records of its folder."""
    monkeypatch.setattr(ahead, "reward", longer)

    def run(name, **changes):
        ended(ahead, model_folder, problems, name=name, output=tmp_path, **{**SIZES, **changes})
        return metrics(tmp_path / name)

    return run


@pytest.fixture
def plain(model_folder, problems, tmp_path):
    """The same loop with ``generate``."""
    current_executor().stop()
    source, rows = load_model(str(model_folder)), load_rows(str(problems))
    objective = rl_fn.recipes.dapo().replace(correction=rl_fn.components.TIS(2.0))
    rollout, policy = Rollout(source), Policy(source, objective, AdamW(0.02, warmup=10, total=3))
    with Run("plain", state=[policy, rows], output=tmp_path) as run:
        for step in run.steps(3):
            policy.sync_weights(rollout)
            groups = rollout.generate(rows.take(4), SamplingParams(n=4, max_new_tokens=5, seed=step)).score(longer)
            batch = policy.score(groups.batch()).with_advantages(objective)
            run.log(policy.update(batch), groups)
    current_executor().stop()
    return metrics(tmp_path / "plain")


def test_without_staleness_the_numbers_are_the_plain_loop_s(plain, run_here):
    records = run_here("example", max_staleness=0)
    assert [{name: record[name] for name in own} for record, own in zip(records, plain, strict=True)] == plain
    assert plain[0]["policy_loss"] != plain[1]["policy_loss"] and records[2]["staleness_max"] == 0


class Guess:
    """Answers each turn with its number, and gives a reward for the ones in it."""

    def reset(self, row):
        self.turns = 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        self.turns += 1
        answer = [{"role": "tool", "content": f"={self.turns}"}]
        return Step(messages=answer, reward=messages[-1]["content"].count("1") - 0.1 * len(messages[-1]["content"]))


def conversing(model_folder, problems, output, name, **changes):
    """The records of a loop over conversations: ahead of training, or in turn without ``max_staleness``."""
    current_executor().stop()
    staleness, resume, stop_at = (changes.get(key) for key in ("max_staleness", "resume", "stop_at"))
    source, rows, objective = load_model(str(model_folder)), load_rows(str(problems)), rl_fn.recipes.dapo()
    rollout, policy = Rollout(source), Policy(source, objective, AdamW(0.02, total=3))
    sampling, talk = SamplingParams(n=2, max_new_tokens=3), {"environment": Guess, "max_turns": 2}
    drawn = None
    if staleness is not None:
        sizes = {"prompts": 4, "steps": 3, "max_staleness": staleness}
        drawn = Ahead(rollout, policy, rows, "environment", sampling, **sizes, **talk)
    try:
        with (
            drawn or nullcontext(),
            Run(name, [policy, drawn or rows], output=output, checkpoint_every=1, resume=bool(resume)) as run,
        ):
            for step in run.steps(3):
                if step == stop_at:
                    raise KeyboardInterrupt
                if drawn is None:
                    policy.sync_weights(rollout)
                    groups = rollout.converse(rows.take(4), replace(sampling, seed=step), **talk).score("environment")
                else:
                    groups = drawn.groups()
                batch = policy.score(groups.batch()).with_advantages(objective)
                run.log(policy.update(batch, stale=True), groups)
    finally:
        current_executor().stop()
    return metrics(output / name)


def alike(records, others):
    """Whether the records have the others' numbers: which turns are decoded together, and so the last bits of these,
    depends on how soon an environment answers."""
    for record, other in zip(records, others, strict=True):
        names = [name for name, value in other.items() if not isinstance(value, str)]
        if [record[name] for name in names] != pytest.approx([other[name] for name in names], rel=1e-4, abs=1e-5):
            return False
    return True


def test_conversations_ahead_of_training_are_those_of_the_plain_loop_and_taken_up_again(
    model_folder, problems, tmp_path
):
    inputs = (model_folder, problems, tmp_path)
    plain = conversing(*inputs, "plain")
    assert alike(conversing(*inputs, "turns", max_staleness=0), plain)
    assert plain[0]["policy_loss"] != plain[1]["policy_loss"] and plain[0]["turns"] > 1
    whole = conversing(*inputs, "whole", max_staleness=1)
    assert [record["staleness_max"] for record in whole] == [0, 1, 1]
    with pytest.raises(KeyboardInterrupt):
        conversing(*inputs, "stopped", max_staleness=1, stop_at=2)
    assert alike(conversing(*inputs, "stopped", max_staleness=1, resume=True), whole)


def test_a_resumed_loop_ends_bit_for_bit_as_one_that_was_not_stopped(run_here, tmp_path, monkeypatch):
    whole = run_here("whole")
    assert [record["staleness_max"] for record in whole] == [0, 1, 1]
    update, calls, run = ahead.Policy.update, [], ahead.Run

    def interrupted(policy, batch, **options):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return update(policy, batch, **options)

    monkeypatch.setattr(ahead, "Run", lambda *args, **options: run(*args, checkpoint_every=1, **options))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ahead.Policy, "update", interrupted)
        run_here("stopped")
    assert run_here("stopped", resume=True) == whole
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]


def test_what_would_not_be_taken_up_again_or_drawn_is_refused(model_folder, problems, tmp_path):
    current_executor().stop()
    try:
        source, rows, objective = load_model(str(model_folder)), load_rows(str(problems)), rl_fn.recipes.grpo()
        sampling, sizes = SamplingParams(n=2, max_new_tokens=2), {"prompts": 2, "steps": 1}
        policy, rollout = Policy(source, objective, AdamW(1e-3)), Rollout(source)
        with pytest.raises(ValueError, match="leave the rows out"):
            Run("twice", [policy, rows, Ahead(rollout, policy, rows, longer, sampling, **sizes)], output=tmp_path)
        assert not (tmp_path / "twice").exists()
        with pytest.raises(ValueError, match="without max_staleness nothing runs ahead"):
            Ahead(rollout, policy, rows, longer, sampling, **sizes, max_staleness=0, partial=True)
        with pytest.raises(ValueError, match="no limits of a step"):
            Ahead(Rollout(source, RolloutOptions(request_seconds=9.0)), policy, rows, longer, sampling, **sizes)
        with pytest.raises(ValueError, match="this rollout takes turns with others"):
            Ahead(Rollout(source, turns=Turns()), policy, rows, longer, sampling, **sizes)
        with pytest.raises(ValueError, match=r"NLL\(\) learns from rows"):
            Ahead(rollout, Policy(source, NLL(), AdamW(1e-3)), rows, longer, sampling, **sizes)
    finally:
        current_executor().stop()
