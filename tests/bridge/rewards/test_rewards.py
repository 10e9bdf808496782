import copy
import re
import threading
import time

import numpy as np
import pytest

from rl_bridge.data.trajectory import single_turn
from rl_bridge.rewards import RewardError, exact_match, load_reward, score
from rl_bridge.rewards import rewards as waiting
from rl_bridge.rewards.function import protocol_of
from rl_bridge.rewards.sources import RewardOptions, load
from tests.support.reward_batches import trajectories

ROW = {"prompt": "1+1=", "answer": "2", "_where": "problems.jsonl, row 7"}


@pytest.fixture
def reward_file(tmp_path):
    def write(text):
        path = tmp_path / "my_reward.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_reward_is_loaded_by_file_and_name(reward_file):
    path = reward_file("def score(completion, row):\n    return len(completion) / int(row['answer'])\n")
    assert load_reward(f"{path}:score")("abcd", ROW) == 2.0


def test_a_reward_file_may_define_dataclasses(reward_file):
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass"
    text = f"{imports}\n\n@dataclass\nclass Rule:\n    x: float\n"
    path = reward_file(f"{text}\ndef score(completion, row):\n    return Rule(0.5).x\n")
    assert load_reward(f"{path}:score")("", ROW) == 0.5


KINDS = "a reward is exact, environment, model:FOLDER, judge:FILE.toml, http(s)://… or FILE.py:function, got "
SOURCES = ("reward", "reward.py", "reward.py:", "reward.txt:score", "reward.py:a.b", ":score", "", "ftp://x/y")


@pytest.mark.parametrize(
    ("source", "near"),
    [
        *((source, "") for source in SOURCES),
        ("exakt", "; did you mean exact?"),
        ("enviroment", "; did you mean environment?"),
        ("modle:runs/x", "; did you mean model:FOLDER?"),
        ("jugde:a.toml", "; did you mean judge:FILE.toml?"),
    ],
)
def test_a_source_of_another_form(source, near):
    with pytest.raises(ValueError, match=re.escape(f"{KINDS}{source!r}{near}") + "$"):
        load_reward(source)


def test_a_missing_reward_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such reward file: .*absent\.py"):
        load_reward(f"{tmp_path / 'absent.py'}:score")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(completion, row): return 1.0", r"my_reward\.py has no function 'score'"),
        ("score = 3", r"my_reward\.py has no function 'score'"),
        ("def score(:", r"my_reward\.py cannot be loaded: SyntaxError"),
        ("import no_such_module_here", r"my_reward\.py cannot be loaded: ModuleNotFoundError: .*no_such_module_here"),
        ("raise RuntimeError('at import')", r"my_reward\.py cannot be loaded: RuntimeError: at import"),
    ],
)
def test_a_reward_file_that_cannot_serve(reward_file, text, message):
    path = reward_file(text)
    with pytest.raises(ValueError, match=message):
        load_reward(f"{path}:score")


def completions(*texts):
    """One trajectory a row, in order."""
    return [
        single_turn([2], [3], group=i, messages=({"role": "assistant", "content": text},))
        for i, text in enumerate(texts)
    ]


def test_scores_are_floats_in_order():
    def rewards(reward, *texts):
        return [t.rewards for t in score(reward, completions(*texts), [ROW] * len(texts))]

    assert rewards(lambda c, row: len(c), "", "a", "bb") == [{"reward": 0.0}, {"reward": 1.0}, {"reward": 2.0}]
    assert rewards(lambda c, row: c == "a", "a", "b") == [{"reward": 1.0}, {"reward": 0.0}]
    assert rewards(lambda c, row: np.mean([1.0, 2.0]), "a") == [{"reward": 1.5}]


def test_a_trajectory_is_rewarded_by_the_row_of_its_group():
    rows = [{**ROW, "answer": str(i)} for i in range(3)]
    asked = [completions("0", "1", "2")[i] for i in (2, 0, 0, 1)]
    scored = score(lambda c, row: float(c == row["answer"]) + int(c), asked, rows)
    assert [t.rewards["reward"] for t in scored] == [3.0, 1.0, 1.0, 2.0]
    assert [t.row for t in scored] == [rows[i] for i in (2, 0, 0, 1)]
    assert [t.tokens for t in scored] == [t.tokens for t in asked] and not any(t.rewards for t in asked)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, "1", [1.0], 1j])
def test_a_reward_that_is_no_finite_number_names_the_row(value):
    def broken(completion, row):
        return value if completion == "bad" else 1.0

    message = f"reward broken on problems.jsonl, row 7 returned {value!r}, expected a finite number; completion 'bad'"
    with pytest.raises(ValueError, match=re.escape(message)):
        score(broken, completions("good", "bad"), [{**ROW, "_where": "problems.jsonl, row 6"}, ROW])


def test_a_reward_that_raises_names_the_row():
    def broken(completion, row):
        return 1 / 0

    message = "reward broken on problems.jsonl, row 7 raised ZeroDivisionError: division by zero; completion 'a'"
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        score(broken, completions("a"), [ROW])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_row_must_come_with_each_completion():
    with pytest.raises(ValueError, match="a trajectory of group 1 has no row; there are 1"):
        score(exact_match, completions("a", "b"), [ROW])


@pytest.mark.parametrize(
    ("completion", "answer", "wanted"), [("2", "2", 1.0), (" 2\n", 2, 1.0), ("22", "2", 0.0), ("", "2", 0.0)]
)
def test_exact_match(completion, answer, wanted):
    assert exact_match(completion, {"answer": answer}) == wanted


def test_the_second_of_two_files_of_one_name_is_its_own_module(tmp_path):
    """Run by run, the file of the name may be another one: classes look their own module up by name."""
    for folder, value in (("first", 1.0), ("second", 2.0)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "same_name.py"
        file.write_text(f"import sys\nVALUE = {value}\ndef own(c, row):\n    return sys.modules[__name__].VALUE\n")
        assert load_reward(f"{file}:own")("", {}) == value


def test_a_reward_that_takes_long_is_named_again_and_again_and_not_ended(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "EVERY", 0.05)

    def slow(completion, row):
        if completion == "b":
            deadline = time.monotonic() + 20
            while len(caplog.records) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        return 1.0

    rows = [ROW, {**ROW, "_where": "problems.jsonl, row 8"}]
    assert [t.rewards["reward"] for t in score(slow, completions("a", "b"), rows)] == [1.0, 1.0]
    first, second = [record.getMessage() for record in caplog.records[:2]]
    for words in (first, second):
        assert words.startswith("waiting for reward reward on problems.jsonl, row 8 (1 of 2 results so far)")
        assert words.endswith(", for 0 s now")
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards are awaited"]


@pytest.mark.parametrize("before", ["", "style="])
@pytest.mark.parametrize("kind", ["model:", "judge:", "model: "])
def test_a_reward_with_nothing_behind_its_colon_is_refused_as_that(kind, before):
    for refuse in (lambda source: load([source]), lambda source: RewardOptions(reward=(source,))):
        with pytest.raises(ValueError, match=rf"the reward '{before}{kind}' names no (folder|TOML file)"):
            refuse(before + kind)


@pytest.mark.parametrize("second", ["answer", "solution", "ground_truth", "reference", "target", "gold", "expected"])
def test_a_second_parameter_that_asks_for_a_column_is_refused_though_no_row_has_it(second):
    """`completion == solution` compared with the whole row, and was 0 for all."""
    scope: dict = {}
    exec(f"def reward(completion, {second}):\n    return float(completion == {second})\n", scope)
    with pytest.raises(ValueError, match=r"Behind a completion comes the whole row, which has the answer as row"):
        protocol_of(scope["reward"], "reward")


def test_a_reward_cannot_change_the_rows():
    def spoil(completion, row):
        row["answer"] = row["nested"].pop()
        return 1.0

    def spoil_batch(trajectories):
        for t in trajectories:
            t.row.clear()
            t.messages[-1]["content"] = ""
        return [1.0] * len(trajectories)

    def spoil_messages(messages, answer):
        messages.pop(0)["content"] = answer.pop()
        messages[0]["content"] = ""
        return 1.0

    def spoil_verl(data_source, solution_str, ground_truth, extra_info):
        return float(extra_info["nested"].pop() == ground_truth.pop() == "2")

    def spoil_trl(completions, nested, **columns):
        columns["answer"].clear()
        return [float(own.pop() == "2") for own in nested]

    row = {"prompt": "a", "answer": ["2"], "nested": ["2"], "extra_info": {"nested": ["2"]}}
    data = [copy.deepcopy(row)]
    for function in (spoil, spoil_batch, spoil_messages, spoil_verl, spoil_trl):
        # Completions of one prompt have one row between them.
        for scored in load(function).score([each for each in trajectories("x", data=data) for _ in range(3)]):
            assert scored.row is data[0] and scored.completion == "x" and scored.rewards == {"reward": 1.0}
            assert scored.messages == trajectories("x", data=data)[0].messages
    assert data == [row]


def test_a_reward_that_keeps_the_rows_cannot_change_the_next_ones():
    source = {"prompt": "a", "answer": [1]}

    def grows(completion, row):
        source["answer"].append(1)
        return float(len(row["answer"]))

    several = [each for each in trajectories("x", data=[source]) for _ in range(3)]
    assert [scored.rewards["reward"] for scored in load(grows).score(several)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("together", [False, True])
def test_a_row_that_cannot_be_copied_is_named(together):
    class Single:
        def __deepcopy__(self, memo):
            raise TypeError("there is one of me")

    async def later(completion, row):
        return 1.0

    data = [{"prompt": "a", "_where": "row 0"}, {"prompt": "b", "_where": "row 1", "own": Single()}]
    with pytest.raises(RewardError, match="on row 1 failed: no copy of its row: TypeError: there is one of me"):
        load(later if together else lambda completion, row: 1.0).score(trajectories("x", "y", data=data))
