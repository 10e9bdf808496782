"""A run that is resumed anyway compares no number with one of other held-out rows or of another reward."""

import json

import pytest

from rl_bridge.checkpoints import Checkpointer
from rl_tools.cli import main
from tests.support.results import metrics

REWARD = "def graded(completion, row):\n    return {scale}\n"
SHORT = "def short(completion, row):\n    return {scale} * len(completion)\n"
BEFORE = {"policy": "accuracy_before", "sft": "nll_before", "preference": "before"}
OF_ROWS = {
    "sft": ("--rows-per-step", 8, "--evaluate-every", 1, "--optimizer.warmup", 0),
    "preference": ("--rows-per-step", 8, "--evaluate-every", 1, "--optimizer.warmup", 0),
}


def rows_of(numbers):
    lines = ({"prompt": f"{n}+1=", "answer": str(n + 1), "chosen": str(n + 1), "rejected": str(n)} for n in numbers)
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def words(tmp_path, model_folder, arguments):
    """The words of a command by the trainer and the number of its steps; each has its files in ``tmp_path``."""
    (tmp_path / "rows.jsonl").write_text(rows_of(range(10, 50)))
    (tmp_path / "reward.py").write_text(REWARD.format(scale=1.0))

    def of(trainer, steps, rewards=("reward.py:graded",)):
        if trainer == "policy":
            changes = {"--sft.steps": 0, "--policy.steps": steps, "--policy.evaluate-every": 1, "--held-out": 6}
            changes |= {"--data": tmp_path / "rows.jsonl", "--optimizer.warmup": 0}
            return [*arguments("run", **changes), "--reward", *(str(tmp_path / reward) for reward in rewards)]
        of_run = ("--model", model_folder, "--output", tmp_path, "--name", "run", "--threads", 1, "--steps", steps)
        rows = ("--data", tmp_path / "rows.jsonl", "--held-out", 6)
        return ["train", trainer, *map(str, (*of_run, *rows, *OF_ROWS[trainer]))]

    return of


def nothing(folder, words):
    return words


def rows_appended(folder, words):
    (folder / "rows.jsonl").write_text(rows_of(range(10, 60)))
    return words


def longer_eval_data(folder, words):
    (folder / "eval.jsonl").write_text(rows_of(range(60, 68)))
    place = words.index("--held-out")
    return [*words[:place], "--eval-data", str(folder / "eval.jsonl"), *words[place + 2 :]]


def smaller_reward(folder, words):
    (folder / "reward.py").write_text(REWARD.format(scale=0.01))
    return words


def other_weights(folder, words):
    return [*words, "--reward-weights", "0.5"]


def shorter_completions(folder, words):
    return [*words, "--policy.sampling.max-new-tokens", "4"]


def other_rate(folder, words):
    return [*words, "--optimizer.learning-rate", "0.002"]


ROWS = [rows_appended, longer_eval_data]
CASES = [
    *(("policy", change) for change in (nothing, other_rate, *ROWS)),
    *(("policy", change) for change in (smaller_reward, other_weights, shorter_completions)),
    *((trainer, change) for trainer in OF_ROWS for change in (nothing, other_rate, *ROWS)),
]


@pytest.mark.long
@pytest.mark.parametrize(("trainer", "change"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_what_another_evaluation_measured_is_compared_with_nothing(tmp_path, words, trainer, change, capsys):
    """The first step's constant reward of 1 stays the best, unless it is of another evaluation."""
    folder = tmp_path / "run"
    assert main(words(trainer, 1)) == 0
    first = json.loads((folder / "summary.json").read_text())
    assert main([*change(tmp_path, words(trainer, 2)), "--resume-anyway"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    newest = Checkpointer(folder / "checkpoints").latest()
    best = Checkpointer(folder / "checkpoints").read(newest)["best"]
    notes = [line["note"] for line in metrics(folder) if "note" in line]
    same = change in (nothing, other_rate)
    if same:
        assert summary[BEFORE[trainer]] == first[BEFORE[trainer]]
        assert not any("measured otherwise" in note or "held-out rows are other" in note for note in notes)
    else:
        assert BEFORE[trainer] not in summary and "gain" not in summary
        assert best["record"] == 2  # the only step of this evaluation
        for words_of_note in ("there is no gain over the run's beginning", "the best of the steps that follow"):
            assert words_of_note in printed and any(words_of_note in note for note in notes)
    if trainer == "policy":
        assert best["record"] == (1 if same else 2) and ("gain" in summary) == same
        assert set(json.loads((folder / "samples.json").read_text())) == ({"before", "after"} if same else {"after"})
    trained = "rows that the steps before trained on may be among them"
    assert (trained in printed) == (change in ROWS) == any(trained in note for note in notes)
    # What it was resumed with is from now on the run's own.
    (folder / "summary.json").unlink()
    assert main([*change(tmp_path, words(trainer, 2)), "--resume"]) == 0
    again = json.loads((folder / "summary.json").read_text())
    assert {name: again.get(name) for name in (BEFORE[trainer], "gain", "result")} == {
        name: summary.get(name) for name in (BEFORE[trainer], "gain", "result")
    }


@pytest.mark.long
@pytest.mark.parametrize("other", [False, True])
def test_the_front_of_several_rewards_is_of_one_evaluation(tmp_path, words, other):
    (tmp_path / "short.py").write_text(SHORT.format(scale=1.0))
    rewards = ("reward.py:graded", "short.py:short")
    assert main(words("policy", 1, rewards)) == 0
    if other:
        (tmp_path / "short.py").write_text(SHORT.format(scale=0.01))
    assert main([*words("policy", 2, rewards), "--resume-anyway"]) == 0
    front = json.loads((tmp_path / "run" / "pareto.json").read_text())
    assert [point["step"] for point in front["evaluations"]] == ([2] if other else [1, 2])
