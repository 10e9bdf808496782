"""Children of every kind: nothing of them is left, however this process or they end, and their end is reported."""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from rl_bridge.common import guard
from rl_bridge.common.children import Child
from rl_bridge.common.guard import end_session
from rl_bridge.environments import load_environment
from rl_bridge.environments.environment_calls import EnvironmentProcesses
from tests.bridge.common.kinds import ENVIRONMENT, KINDS, begun, file
from tests.support.processes import gone

ENDS = {
    "reward": r"reward score on .*row 1 ended its process with exit status 7; completion 'a'(.|\n)*the last line",
    "environment": r"the environment ended its process in reset\(\)(.|\n)*the last line",
    "server": r"server \(process \d+\) ended with exit status 7; the end of .*log:\nthe last line",
    "trial": r"code=7, .*'the last line'",
    "sampler": r"with exit status 1; the end of .*system.log:\n(.|\n)*IsADirectoryError",
    "live_export": r"tensorboard.log:\n(.|\n)*the last line(.|\n)*tensorboard is behind this run: .* with status 7; to",
}


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


def reaped(child):
    """No zombie of the child is left to this process."""
    return child.dead.is_set() and not Path(f"/proc/{child._guard.pid}").exists()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Processes by kind, whose parent was killed while a fork of the parent lives."""
    folder = tmp_path_factory.mktemp("killed")
    path = os.pathsep.join([str(folder / "live_export"), *filter(None, sys.path)])
    words = [sys.executable, "-m", "tests.bridge.common.kinds", str(folder)]
    options = {"env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, **options) as process:
        pids = json.loads(process.stdout.readline())
        process.kill()
        process.wait()
        yield pids
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_a_process_that_is_killed(kind, killed):
    assert len(killed[kind]) == (2 if kind == "sampler" else 4)
    assert all(gone(pid) for pid in killed[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_child_is_reported(kind, tmp_path, capfd):
    if kind == "sampler":
        (tmp_path / "end").touch()
    opened = KINDS[kind](tmp_path)
    pids = [] if kind == "sampler" else begun(tmp_path, opened)
    (tmp_path / "end").touch()
    report = opened.report()
    opened.close()
    assert re.search(ENDS[kind], report + "".join(capfd.readouterr()))
    assert reaped(opened.child) and all(gone(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_closing_twice_leaves_nothing(kind, tmp_path):
    opened = KINDS[kind](tmp_path)
    pids = begun(tmp_path, opened)
    opened.close()
    opened.close()
    assert reaped(opened.child) and all(gone(pid) for pid in pids)


@pytest.mark.long
def test_an_environment_that_ends_its_process_while_it_is_loaded(tmp_path):
    text = f"{ENVIRONMENT}if (folder / 'end').exists():\n    work()\n"
    factory = load_environment(f"{file(tmp_path, 'mine.py', text)}:Game")
    (tmp_path / "end").touch()
    with pytest.raises(ValueError, match="in a process of its own: its process ended with exit status 7"):
        EnvironmentProcesses(factory, limit=1.0)


def started(folder, text, **options):
    return Child([sys.executable, "-c", text], log=folder / "log", **options)


def wait_for(file):
    deadline = time.monotonic() + 60.0
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file.name}"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_guard_that_is_killed_or_stopped_leaves_nothing(tmp_path, number):
    child = started(tmp_path, f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine; mine.work()", grace=0.1)
    file(tmp_path, "mine.py", "")
    wait_for(tmp_path / "pids")
    pids = [child.pid, *map(int, (tmp_path / "pids").read_text().split())]
    os.kill(child._guard.pid, number)
    if number == signal.SIGSTOP:
        child.stop()
    assert child.how_it_ended() == "by SIGKILL" and child.status == -9
    assert reaped(child) and all(gone(pid) for pid in pids)


POLITE = """
import pathlib, signal, sys, time
def end(*ignored):
    print("asked", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["stop", "the object's end"])
def test_a_child_is_asked_first(tmp_path, end):
    child = Child([sys.executable, "-c", POLITE, str(tmp_path / "ready")], log=tmp_path / "log", grace=60.0)
    wait_for(tmp_path / "ready")
    pid, dead, status = child.pid, child.dead, child._status
    if end == "stop":
        child.stop()
    del child
    gc.collect()
    assert dead.wait(60.0) and gone(pid) and status == [5]
    assert (tmp_path / "log").read_text() == "asked\n"


def test_a_child_that_is_deaf_is_killed_after_its_grace(tmp_path):
    text = "import pathlib, signal, sys, time; signal.signal(15, signal.SIG_IGN); pathlib.Path(sys.argv[1]).touch()"
    words = [sys.executable, "-c", f"{text}; time.sleep(1000)", str(tmp_path / "ready")]
    child = Child(words, log=tmp_path / "log", grace=0.2)
    wait_for(tmp_path / "ready")
    child.request_end()
    assert child.dead.wait(60.0) and child.status == -9


def test_a_child_has_no_descriptors_but_its_own_and_no_full_pipe_stops_it(tmp_path):
    """The log gets all of more than a pipe holds."""
    with (tmp_path / "open").open("w") as other:
        os.set_inheritable(other.fileno(), True)
        text = "import os; print(*sorted(os.listdir('/proc/self/fd'))); print('x' * 10**6)"
        child = started(tmp_path, text)
        assert child.dead.wait(60.0) and child.status == 0
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "0 1 2 3" and len(second) == 10**6, "3 is the folder that is listed"


def test_a_parent_with_more_descriptors_than_select_takes(tmp_path):
    """The guard has its end of the socket under the parent's number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1024):
                stack.enter_context(open(os.devnull))
            child = started(tmp_path, "import sys; sys.exit(7)")
            assert child.how_it_ended() == "with exit status 7", child.tail()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_parent_that_ignores_its_childrens_ends(tmp_path):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert started(tmp_path, "import sys; sys.exit(7)").how_it_ended() == "with exit status 7"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_child_that_nothing_can_watch_is_ended_at_once(tmp_path, monkeypatch):
    """No thread can be started: at the interpreter's end, or at a limit of processes."""
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    guards, began = [], time.monotonic()
    monkeypatch.setattr(guard, "end_session", lambda pid: guards.append(pid) or end_session(pid))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started(tmp_path, "import time; time.sleep(1000)", grace=60.0)
    gc.collect()
    assert len(guards) == 1 and gone(guards[0])
    assert time.monotonic() < began + 60.0, "nobody would say that the grace is over"


def test_a_command_that_is_not_there(tmp_path):
    child = Child([str(tmp_path / "absent")], log=tmp_path / "log", record=tmp_path / "record")
    assert child.how_it_ended() == "with exit status 127" and child.pid == -1
    assert "absent cannot be started: [Errno 2] No such file" in child.tail()
    assert (tmp_path / "record.exit").read_text() == '{"code": 127}'


def test_two_children_of_one_record(tmp_path):
    """The second one is not started, and leaves no status."""
    first = started(tmp_path, "import time; time.sleep(1000)", record=tmp_path / "record")
    second = started(tmp_path, "", record=tmp_path / "record")
    assert second.how_it_ended() == "by SIGKILL" and second.pid == -1 and not (tmp_path / "record.exit").exists()
    first.kill()
    assert started(tmp_path, "", record=tmp_path / "record").how_it_ended() == "with exit status 0"
