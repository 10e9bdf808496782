"""A kill is a test that passes alone without the fault and fails, or hangs, alone with it: in a repository of one."""

import json
import math
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.mutation.forked import BROKEN, NO_TESTS, Outcome, alone, blamed
from tests.mutation.worker import ROOT

pytestmark = pytest.mark.long

SOURCE = "def double(x):\n    return 2 * x\n"
TESTS = """
from code_under_test import double

RAN = []

def test_a_run_before():
    RAN.append(1)

def test_b_that_fails_after_another():
    assert not RAN

def test_c_that_always_fails():
    raise AssertionError

def test_d_of_zero():
    assert double(0) == 0

def test_e_of_the_value():
    assert double(2) == 4
"""
HANGING = """
from code_under_test import double

def test_it():
    assert double(2) == 4
"""
PLANTED = {
    "a value": "def double(x):\n    return 3 * x\n",
    "nothing": "def double(x):\n    return x * 2\n",
    "an import": "raise ImportError\n",
    "a hang": "import time\ndef double(x):\n    time.sleep(1000)\n",
    "a loop": "def double(x):\n    while True:\n        pass\n",
    "a death": "import os\ndef double(x):\n    os._exit(3)\n",
}
SCRIPT = """
import json, os, pathlib, sys
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
from tests.mutation import forked
folder = pathlib.Path(sys.argv[1])
os.chdir(folder)
sys.path.insert(0, str(folder / "bridge"))
planted = json.loads(sys.argv[2])

def run(name):
    tests, forked.IDLE_SECONDS, forked.HANG_SECONDS = ("tests", 60.0, 20.0)
    if name in ("a hang", "a loop"):
        tests, forked.IDLE_SECONDS, forked.HANG_SECONDS, forked.SLOWER = ("hang", 5.0, 1.0, 1.0)
    seconds = 2.0 if name == "a loop" else 120.0
    return forked.Server(folder, "bridge", tests).run("code_under_test.py", planted[name], "double", seconds)

print(json.dumps({name: run(name) for name in planted}))
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    for name, text in {
        "bridge/code_under_test.py": SOURCE,
        "tests/test_code.py": TESTS,
        "hang/test_it.py": HANGING,
    }.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    arguments = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), json.dumps(PLANTED)]
    ran = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "bridge/code_under_test.py").read_text() == SOURCE
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("planted", "status", "by"),
    [
        ("a value", "killed", "tests/test_code.py::test_e_of_the_value"),
        ("nothing", "survived", ""),
        ("an import", "killed", "tests/test_code.py"),
        ("a hang", "timeout", "hang/test_it.py::test_it"),
        ("a loop", "timeout", "hang/test_it.py::test_it"),
        ("a death", "killed", "tests/test_code.py::test_d_of_zero"),
    ],
)
def test_a_kill_is_confirmed_by_the_killing_test_alone_with_and_without_the_fault(verdicts, planted, status, by):
    """CORE-14: six faults were "killed" by tests that fail after others, or always; neither kind is a verdict."""
    assert verdicts[planted][:2] == [status, by]


@pytest.mark.parametrize(
    ("outcome", "by"),
    [
        (Outcome(code=0, failed="t::a"), ""),
        (Outcome(code=NO_TESTS), ""),
        (Outcome(code=1, failed="t::a", running="t::b"), "t::a"),
        (Outcome(code=-11, running="t::b"), "t::b"),
        (Outcome(code=4), "first"),
        (Outcome(code=None, running="t::b", since=math.inf), ""),
        (Outcome(code=None, running="t::b", since=-math.inf), "t::b"),
    ],
)
def test_what_a_run_of_tests_ended_at(outcome, by):
    assert blamed(outcome, "first") == by


@pytest.mark.parametrize("code", [BROKEN, -signal.SIGKILL])
def test_a_process_that_could_not_run_or_was_ended_for_its_memory_is_no_verdict(code):
    with pytest.raises(ValueError, match="no verdict"):
        blamed(Outcome(code=code), "first")


def test_a_file_that_cannot_be_collected_is_collected_alone():
    assert alone("tests/test_a.py") == ["--collect-only", "tests/test_a.py"]
    assert alone("tests/test_a.py::test_b[x]") == ["tests/test_a.py::test_b[x]"]
