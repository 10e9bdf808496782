"""A completion that failed or was given up says nothing of the policy: it is in no mean, and it is counted."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rl_bridge
from rl_bridge.algorithms.completions import failures, rewarded, without_signal
from rl_bridge.algorithms.evaluation import Evaluator, evaluate, gain, pass_rates
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import single_turn
from rl_bridge.rewards import RewardError, load
from tests.support.reward_batches import rows

REWARDS = {
    "one": lambda completion, row: float(completion),
    "two": lambda completion, row: {"a": float(completion), "b": 2.0},
    "some": lambda completion, row: {"a": None if completion == "2" else float(completion), "b": 2.0},
    "none": lambda completion, row: None if completion == "2" else float(completion),
}
NAMES = {"error": "errors", "abort": "aborted"}
SAMPLING = rl_bridge.SamplingParams(n=4, max_new_tokens=9)


def drawn(number, group, reason="length", **fields):
    """Completion ``number`` of a group says its number, with as many tokens and one more; all had two turns."""
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": str(number)})
    counts = {"turns": 2, "group": group, "finish_reason": reason, "row": {"prompt": "x"}} | fields
    return single_turn([5], [6] * (number + 1), logprobs=[-0.5] * (number + 1), messages=messages, **counts)


def groups_of(reward, failed=(), reason="error", **options):
    """Two groups of completions 1 to 3, and among them one that failed, at places of its own."""
    trajectories = []
    for group in range(2):
        own = [drawn(number, group, "length" if number == 3 else "stop") for number in (1, 2, 3)]
        if failed:
            own.insert(failed[group], drawn(8, group, reason, turns=7))
        trajectories += own
    sampling = replace(SAMPLING, n=len(trajectories) // 2)
    groups = rl_bridge.Groups(trajectories=trajectories, sampling=sampling, pad_token=0)
    return groups.score(reward, none="leave-out", **options)


@pytest.mark.parametrize("reason", NAMES)
@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("failed", [(0, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("buffer", [None, 8])
def test_every_metric_is_that_of_the_completions_that_ended(reason, kind, failed, buffer):
    options = {} if buffer is None else {"overlong_buffer": buffer}
    groups, without = (groups_of(REWARDS[kind], at, reason, **options) for at in (failed, ()))
    metrics = groups.metrics()
    assert metrics.pop(NAMES[reason]) == 0.25
    assert metrics | {"errors": 0.0} == pytest.approx(without.metrics())
    held_out = groups.held_out(pass_at=(1, 2))
    assert held_out.pop(f"held_out_{NAMES[reason]}") == 0.25
    assert held_out | {"held_out_errors": 0.0} == pytest.approx(without.held_out(pass_at=(1, 2)))


@given(reasons=st.lists(st.sampled_from(["stop", "length", *NAMES]), max_size=5), turns=st.integers(1, 2))
@example(reasons=["error"], turns=1)
@example(reasons=["abort"], turns=2)
def test_the_shares_of_failures_are_of_all_completions_however_few(reasons, turns):
    shares = failures([drawn(0, 0, reason, turns=turns) for reason in reasons])
    for reason, name in NAMES.items():
        assert shares.get(name, 0) * len(reasons) == pytest.approx(reasons.count(reason))
        counted = reason in reasons or (name == "errors" and turns == 2 and reasons)
        assert (name in shares) == bool(counted), "a share of none is told of conversations alone"


def completed(reasons):
    """One completion a row and number; the row's answer is what it says, and ``reasons`` how a row's first ended."""

    def complete(rows, sampling):
        return [
            drawn(int(row["answer"]), place, reasons.get(row["answer"], "stop") if number == 0 else "stop")
            for place, row in enumerate(rows)
            for number in range(sampling.n)
        ]

    return complete


REASONS = {"1": "error", "3": "abort"}
CONFIG = PolicyConfig(steps=1, prompts_per_step=1, sampling=replace(SAMPLING, n=2), pass_at=(1,), correct_reward=3.0)


def test_an_evaluation_leaves_failures_out_and_counts_them(tmp_path):
    reward = load(REWARDS["two"])
    data = rows(6)
    found = evaluate(completed(REASONS), data, reward, SAMPLING)
    rest = evaluate(completed({}), [row for row in data if row["answer"] not in REASONS], reward, SAMPLING)
    assert (found["reward"], found["rewards"]) == (rest["reward"], rest["rewards"])
    assert [score for score in found["scores"] if score is not None] == rest["scores"]
    assert found["scores"][1] is found["scores"][3] is None
    assert (found["errors"], found["aborted"]) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert found["samples"][1] | {"prompt": "", "completion": ""} == {
        "prompt": "", "completion": "", "answer": "1", "a": None, "b": None, "failed": "error"
    }  # fmt: skip
    assert gain(found, evaluate(completed({}), data, reward, SAMPLING))["mean"] == 0.0
    evaluator = Evaluator(completed(REASONS), reward, data, CONFIG, tmp_path)
    metrics = evaluator.metrics(0)
    assert metrics["held_out"] == rest["reward"] and metrics["pass@1"] == pytest.approx(3 / 4)
    assert metrics["held_out_errors"] == metrics["held_out_aborted"] == pytest.approx(1 / 6)


def test_pass_at_k_is_of_the_completions_that_ended():
    """Of two completions of a row the first failed: one is left, which passes from 3 on."""
    rates = pass_rates(completed(REASONS), rows(6), load(REWARDS["one"]), replace(CONFIG, pass_samples=2))
    assert rates["pass@1"]["mean"] == pytest.approx(3 / 6)
    with pytest.raises(RewardError, match=r"pass@2 needs 2 completions of a row .* no row has as many that ended"):
        pass_rates(
            completed(dict.fromkeys("012345", "error")), rows(6), load(REWARDS["one"]), replace(CONFIG, pass_at=(2,))
        )


@pytest.mark.parametrize("reason", NAMES)
def test_an_evaluation_of_failures_alone_is_refused(reason):
    everywhere = dict.fromkeys("012", reason)
    with pytest.raises(
        RewardError, match="nothing to measure is left of 3 held-out completions: an environment failed"
    ):
        evaluate(completed(everywhere), rows(3), load(REWARDS["one"]), SAMPLING)
    scored = load(REWARDS["one"]).score(completed(everywhere)(rows(3), replace(SAMPLING, n=1)))
    groups = rl_bridge.Groups(trajectories=scored, sampling=replace(SAMPLING, n=1), pad_token=0)
    with pytest.raises(RewardError, match="nothing to measure is left of 3 held-out completions"):
        groups.score(REWARDS["one"]).held_out()
    with pytest.raises(RewardError, match="no reward applies to any of the 6 held-out completions"):
        groups_of(lambda completion, row: None).held_out()


def test_a_line_about_a_step_without_an_update_is_of_what_ended():
    def line(reward, **options):
        return without_signal(groups_of(reward, **options).scored).partition("completions: ")[2]

    assert line(lambda completion, row: 1.0 if completion != "8" else 5.0, failed=(0, 1)) == "every reward is 1"
    assert line(lambda completion, row: None if completion != "8" else 5.0, failed=(0, 1)) == (
        "no reward applies to any of these"
    )
    failed = [drawn(1, 0, "abort"), drawn(2, 0, "error")]
    whole = rewarded(load(REWARDS["one"]).score(failed), load(REWARDS["one"]), 2, max_new_tokens=9)
    assert without_signal(whole).endswith("all of these failed or were given up")
    assert whole.metrics()["reward"] == 0.0 and not math.isnan(whole.metrics()["tokens"])
