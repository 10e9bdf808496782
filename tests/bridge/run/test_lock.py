"""One process a run folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_bridge.common import files
from rl_bridge.common.files import RunLock
from rl_bridge.run.run import Run
from tests.support.counting_run import Options, go

# A process that takes the lock, says so, and holds it until its input ends. Only the file itself is loaded.
HOLDER = f"""
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("lock", {files.__file__!r})
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
sys.stdin.readline()
try:
    held = lock.RunLock(pathlib.Path(sys.argv[1]))
except ValueError as error:
    print("refused", error, flush=True)
else:
    if sys.argv[2] == "child" and os.fork() == 0:
        print("won", os.getppid(), flush=True)
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    if sys.argv[2] == "alone":
        print("won", os.getpid(), flush=True)
sys.stdin.read()
"""


def start(folder, how="alone"):
    command = [sys.executable, "-c", HOLDER, str(folder), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go_ahead(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def test_of_seven_that_come_at_once_one_gets_it(tmp_path):
    processes = [start(tmp_path) for _ in range(7)]
    for process in processes:
        go_ahead(process)
    said = [process.stdout.readline().split(maxsplit=1) for process in processes]
    [winner] = [text for word, text in said if word == "won"]
    refused = [text for word, text in said if word == "refused"]
    assert len(refused) == 6
    for text in refused:  # the holder's note comes a moment after its lock
        assert text.startswith(
            (f"{tmp_path} is in use by process {winner.strip()} on ", f"{tmp_path} is in use by another")
        )
    for process in processes:
        process.communicate(timeout=30)


@pytest.mark.parametrize("how", ["alone", "child"])
def test_the_lock_of_a_dead_process_stops_nobody(tmp_path, how):
    holder = start(tmp_path, how)
    go_ahead(holder)
    assert holder.stdout.readline().startswith("won")
    with pytest.raises(ValueError, match=rf"is in use by process {holder.pid} on \S+ since 2\d\d\d-.*another --name"):
        RunLock(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(30)
    held = RunLock(tmp_path)  # a child that the dead process forked lives on without the lock
    assert json.loads((tmp_path / files.NAME).read_text())["pid"] == os.getpid()
    holder.stdin.close(), holder.stdout.close()
    held.release()
    held.release()
    assert (tmp_path / files.NAME).read_text() == ""


def test_a_run_is_refused_while_another_one_has_its_folder(tmp_path):
    folder = tmp_path / "run"
    with Run(folder, Options()), pytest.raises(ValueError, match=f"run is in use by process {os.getpid()} on "):
        go(folder, resume=True, fingerprints={})
    assert len(go(folder, resume=True, fingerprints={})) == 6
    # A refusal for another reason gives the lock back.
    with pytest.raises(ValueError, match="--seed was 0 and is 1"):
        go(folder, Options(seed=1), resume=True, fingerprints={})
    RunLock(Path(folder)).release()
