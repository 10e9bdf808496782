"""Rewards of two tasks, each None on the other's rows, are one reward that looks at the row: to the bit."""

import json

import pytest

from tests.support.results import assert_same, metrics, result

pytestmark = pytest.mark.long

REWARDS = """
def sums(completion, row):
    return float(completion.startswith("1")) if row["task"] == "sum" else None

def lengths(completion, row):
    return len(completion) / 8 if row["task"] == "length" else None

def both(completion, row):
    return sums(completion, row) if row["task"] == "sum" else lengths(completion, row)

def some(completion, row):
    return None if int(row["prompt"].partition("+")[0]) % 3 == 0 else both(completion, row)
"""


@pytest.fixture
def train(tmp_path, arguments, run_to_end):
    """A run with these rewards; its folder."""
    rows = [{"prompt": f"{a}+1=", "answer": "", "task": ("sum", "length")[a % 2]} for a in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)

    def run(name, *functions, **options):
        steps = {"--sft.steps": 0, "--policy.steps": 4, "--policy.evaluate-every": 2, "--checkpoint-every": 2}
        words = arguments(name, **{"--data": tmp_path / "rows.jsonl", **steps, **options})
        return run_to_end([*words, "--reward", *(f"{one}={tmp_path / 'mine.py'}:{one}" for one in functions)])

    return run


def test_rewards_of_two_tasks_are_one_that_looks_at_the_row(train):
    one, several = train("one", "both"), train("several", "sums", "lengths", **{"--reward-none": "leave-out"})
    assert result(one)["weights"] == result(several)["weights"]
    for alone, apart in zip(metrics(one), metrics(several), strict=True):
        own = {name: apart[name] for name in alone if name not in ("seconds", "tokens_per_second")}
        assert_same(own, {name: alone[name] for name in own}, f"step {alone['step']}")
        if apart["stage"] == "policy":
            shares = apart["unrewarded/sums"] + apart["unrewarded/lengths"]
            assert (apart["unrewarded"], shares) == (0.0, pytest.approx(1.0))


def test_completions_without_a_reward_are_counted(train):
    whole = train("whole", "some", **{"--reward-none": "leave-out"})
    shares = [record["unrewarded"] for record in metrics(whole) if record["stage"] == "policy"]
    assert len(shares) == 4 and all(0 <= share <= 1 for share in shares) and 0 < sum(shares) < 4
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["gain"]["low"] <= summary["gain"]["mean"] <= summary["gain"]["high"]
    samples = json.loads((whole / "samples.json").read_text())["after"]["greedy"]
    unrewarded = {int(sample["prompt"].partition("+")[0]) % 3 == 0: sample["some"] is None for sample in samples}
    assert unrewarded == {True: True, False: False}
