import importlib.util
import inspect
import re

import pytest

from rl_bridge.data import tasks as reasoning
from rl_bridge.data.tasks import extract_answer, reasoning_reward, reasoning_rows, split_rows

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="make install-smollm2")
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_value": 2, "max_value": 30},
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 4},
    "word_sequence_reversal": {"min_words": 2, "max_words": 3},
}


def question(row):
    return row["prompt"][-1]["content"]


@needs_gym
def test_rows_are_chats_with_distinct_prompts_shared_between_tasks():
    rows = reasoning_rows(TASKS, size=42, seed=0, instruction="Be brief.")
    assert len({question(row) for row in rows}) == 42
    assert sorted(sum(row["task"] == task for row in rows) for task in TASKS) == [10, 10, 11, 11]
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["prompt"][0]["content"] == "Be brief."
        assert question(row)
        assert row["answer"]


@needs_gym
def test_rows_are_a_function_of_the_seed():
    first = reasoning_rows(TASKS, size=20, seed=3)
    assert first == reasoning_rows(TASKS, size=20, seed=3)
    # reasoning-gym's own neighbouring seeds would share all but one problem.
    assert len({question(row) for row in first} & {question(row) for row in reasoning_rows(TASKS, size=20, seed=4)}) < 5


@needs_gym
def test_held_out_prompts_are_not_trained_on():
    train, held_out = split_rows(reasoning_rows(TASKS, size=60, seed=0), held_out=20, seed=0)
    assert not {question(row) for row in train} & {question(row) for row in held_out}
    assert (len(train), len(held_out)) == (40, 20)


@needs_gym
def test_names_alone_use_the_default_arguments():
    assert {row["task"] for row in reasoning_rows(["gcd", "lcm"], size=4, seed=0)} == {"gcd", "lcm"}


@needs_gym
def test_true_answer_scores_one_and_a_wrong_one_less():
    for row in reasoning_rows(TASKS, size=40, seed=1):
        assert reasoning_reward(row["answer"], row) == 1.0
        assert reasoning_reward(f"  {row['answer']}.\n", row) == 1.0
        assert 0.0 <= reasoning_reward("nonsense", row) < 1.0
        assert reasoning_reward("", row) == 0.0


@needs_gym
def test_wrong_number_scores_less_than_one():
    for row in reasoning_rows({"chain_sum": TASKS["chain_sum"]}, size=40, seed=1):
        assert reasoning_reward(f"The answer is {row['answer']}.", row) == 1.0
        assert reasoning_reward(f"{row['answer']} or {int(row['answer']) + 1}", row) < 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("9 + 8 = 17.", "3", "17"),
        ("5-3 is 2", "0", "2"),
        ("5-3", "0", "3"),
        ("= -4", "7", "-4"),
        ("1,000.5 apples", "7", "1,000.5"),
        ("seven", "7", ""),
        ("Ozzy accepts vinyl.", "Tayo", "Ozzy"),
        ("...", "Tayo", ""),
        ("mother-in-law, Ann's", "son", "mother-in-law"),
        (" go, hundred.\nbecause", "a, b", "go, hundred"),
    ],
)
def test_extracted_answer_has_the_form_of_the_true_one(completion, answer, expected):
    assert extract_answer(completion, answer) == expected


@needs_gym
def test_too_few_distinct_problems_are_refused():
    with pytest.raises(ValueError, match=r"chain_sum .* distinct problems .* wanted 300"):
        reasoning_rows({"chain_sum": TASKS["chain_sum"]}, size=300, seed=0)


@pytest.mark.parametrize(("tasks", "size"), [({}, 4), (["gcd", "lcm"], 1)])
def test_a_row_of_each_task_is_required(tasks, size):
    with pytest.raises(ValueError, match="at least one task"):
        reasoning_rows(tasks, size=size, seed=0)


def test_missing_gym_names_the_install_command(monkeypatch):
    monkeypatch.setattr(reasoning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="make install-smollm2"):
        reasoning_rows(["gcd"], size=1, seed=0)


@needs_gym
def test_unknown_task_is_named():
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_rows(["no_such_task"], size=1, seed=0)


@needs_gym
def test_score_outside_the_unit_interval_is_refused(monkeypatch):
    row = reasoning_rows(["gcd"], size=1, seed=0)[0]
    monkeypatch.setattr(reasoning, "_scorer", lambda task: lambda answer, entry: 1.5)
    with pytest.raises(ValueError, match=r"scored 1\.5 .* gcd"):
        reasoning_reward("3", row)


@needs_gym
def test_tasks_whose_scorer_runs_the_answer_are_refused():
    from reasoning_gym.factory import DATASETS

    running = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(dataset.score_answer))
    }
    # number_sorting evaluates its own answer only; composite hands over to any of the others.
    assert running - {"number_sorting"} | {"composite"} == reasoning.UNSAFE
    with pytest.raises(ValueError, match=r"\['n_queens'\].*as Python"):
        reasoning_rows(["gcd", "n_queens"], size=4, seed=0)
    row = {"prompt": [{"role": "user", "content": ""}], "answer": "[1]", "task": "n_queens", "metadata": {}}
    with pytest.raises(ValueError, match=r"n_queens.*as Python"):
        reasoning_reward("__import__('os').getcwd()", row)
