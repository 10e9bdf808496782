"""A sample of the bad inputs (issue 22): no bad one, and none poor that the table of all does not name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bridge.bad_inputs.case import KINDS, SFT, Case, changed
from tests.bridge.bad_inputs.judge import judged
from tests.bridge.bad_inputs.results import known
from tests.bridge.bad_inputs.runner import Outcome

pytestmark = pytest.mark.long

# Each is forked from a process without JAX's threads, which that of the tests is not.
COMMAND = [sys.executable, "-m", "tests.bridge.bad_inputs", "--sample", "2", "--seed", "22"]


def test_a_sample_of_every_kind_is_refused_by_name(tmp_path):
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*COMMAND, "--journal", str(tmp_path / "journal.jsonl")],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [kind for kind in KINDS for _ in range(2)]
    assert [line for line in lines if line["verdict"] == "bad"] == []
    assert [line for line in lines if line["verdict"] == "poor" and line["id"] not in known()] == []


CASE = Case(kind="data", name="x", command=SFT, says=("rows.jsonl", "row 3", "held-out"))
GOOD = "rl-fn: error: rows.jsonl, row 3: held_out must be 1 or more, got 0\n"
JUDGED = {
    "good": (1, GOOD, "good"),
    "accepted": (0, "done\n", "bad"),
    "ended by a signal": (None, "", "bad"),
    "another row": (1, GOOD.replace("row 3", "row 30"), "poor"),
    "another file": (1, GOOD.replace("rows.jsonl", "arrows.jsonl"), "poor"),
    "two errors": (1, GOOD + GOOD, "poor"),
    "a traceback": (1, "Traceback (most recent call last):\n" + GOOD, "poor"),
    "long": (1, GOOD.replace("got", "got " + "x" * 999), "poor"),
    "nothing": (1, "", "poor"),
    "a whole object": (1, GOOD.replace("got 0", "got Options(rows=3, held_out=0)"), "poor"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_the_judge_by_what_is_printed(name, tmp_path):
    status, printed, verdict = JUDGED[name]
    assert judged(CASE, Outcome(status, "hang", printed, tmp_path, 0.0))[0] == verdict


def test_the_judge_by_what_is_left(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert judged(CASE, Outcome(1, "ended", GOOD, tmp_path, 0.0)) == ("poor", "late: leaves the run folder first")
    works = Case(kind="data", name="x", command=SFT, says=(), works=True)
    assert judged(works, Outcome(0, "ended", "", tmp_path, 0.0))[0] == "bad"
    (tmp_path / "runs" / "first" / "summary.json").write_text('{"nll": NaN}')
    assert "nll is nan" in judged(works, Outcome(0, "ended", "", tmp_path, 0.0))[1]


def test_a_case_has_words_and_a_command_its_changes():
    with pytest.raises(ValueError, match="give the words"):
        Case(kind="data", name="x", command=SFT, says=())
    assert changed("train policy --a 1 2 --b objective:gspo", "--a 3", "--b -") == "train policy objective:gspo --a 3"
