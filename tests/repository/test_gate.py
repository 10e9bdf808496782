"""The gate runs every stage, says what failed at its end, and is red for what it must be red for."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PASSES, RERUN = "def test_passes(): pass\n", "def test_second(n=[]):\n    n.append(0)\n    assert len(n) > 1, 'once'\n"
FAILS = "def test_fails(): assert 'this' == 'that'\n"


def loaded(monkeypatch):
    spec = importlib.util.spec_from_file_location("gate", ROOT / ".ci" / "gate.py")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gate", made)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def gate(monkeypatch, tmp_path):
    made = loaded(monkeypatch)
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "FLAKY", tmp_path / "flaky.md")
    monkeypatch.setattr(made, "PHASES", [[["one", "two"], ["three"]], [["four"]]])
    return made


def ran(gate, monkeypatch, capfd, *chosen, **commands):
    monkeypatch.setattr(gate, "COMMANDS", dict.fromkeys(("one", "two", "three", "four"), "true") | commands)
    status = gate.main(chosen)
    return status, capfd.readouterr().out


def pytest_of(tmp_path, name, text):
    (tmp_path / f"test_{name}.py").write_text(text)
    return f"{sys.executable} -m pytest -p no:cacheprovider --reruns 2 -r fER test_{name}.py"


def test_all_stages_run_and_the_end_says_what_failed(gate, monkeypatch, capfd, tmp_path):
    commands = {
        "one": "echo broken; exit 3",
        "three": pytest_of(tmp_path, "bad", PASSES + FAILS + RERUN),
        "four": "echo NOT RUN: no browser; exit 77",
    }
    status, out = ran(gate, monkeypatch, capfd, **commands)
    table = out[out.index("stage            seconds") :]
    assert status == 1
    assert [re.search(rf"^{name} +\d+  (\w+( run)?)", table, re.M)[1] for name in ("one", "two", "three", "four")] == [
        "FAILED",
        "passed",
        "FAILED",
        "not run",
    ]
    assert "FAILED test_bad.py::test_fails - AssertionError: assert 'this' == 'that'" in table
    assert "FLAKY test_bad.py::test_second (three)" in table and "1 failed, 2 passed, 4 rerun" not in table
    assert "FAILED stage one, exit status 3; its last lines:\n    broken" in table
    assert table.rstrip().endswith("stages: 1 passed, 2 failed")
    assert re.search(
        r"\| \d{4}-\d\d-\d\d \| `test_bad.py::test_second` \| three \| not known \|", gate.FLAKY.read_text()
    )


def test_a_test_that_passes_when_it_is_run_again_is_listed_and_more_than_five_are_red(
    gate, monkeypatch, capfd, tmp_path
):
    command = pytest_of(tmp_path, "flaky", RERUN)
    status, out = ran(gate, monkeypatch, capfd, "three", three=command)
    assert status == 0 and "FLAKY test_flaky.py::test_second (three)" in out and "stages: 1 passed, 0 failed" in out
    gate.FLAKY.write_text("| date | test |\n" + "| 2026-01-01 | `t` |\n" * 5)
    assert ran(gate, monkeypatch, capfd)[0] == 0
    status, out = ran(gate, monkeypatch, capfd, "three", three=command)
    assert status == 1 and "lists 6 open faults, 5 are the most" in out


def test_a_stage_that_hangs_says_where_and_ends(gate, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(gate, "LIMIT", 8)
    monkeypatch.setattr(gate, "BEAT", 2)
    hangs = "import time\ndef test_hangs():\n    time.sleep(600)\n"
    status, out = ran(gate, monkeypatch, capfd, "one", "four", one=pytest_of(tmp_path, "hangs", hangs))
    assert status == 1 and "took longer than 8 s" in out and "in test_hangs" in out
    assert re.search(r"^::: one, 2 s: ", out, re.M), "says where it is"
    assert re.search(r"^four +\d+  passed", out, re.M)


def test_a_stage_that_there_is_not_is_refused(gate, monkeypatch, capfd):
    with pytest.raises(SystemExit, match="no such stage: five"):
        ran(gate, monkeypatch, capfd, "five")


def test_each_stage_has_its_place_and_each_target_of_make_exists(monkeypatch):
    made = loaded(monkeypatch)
    assert sorted(name for phase in made.PHASES for lane in phase for name in lane) == sorted(made.COMMANDS)
    targets = set(re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for command in made.COMMANDS.values() for word in re.findall(r"make ([a-z-]+)", command)} <= targets
