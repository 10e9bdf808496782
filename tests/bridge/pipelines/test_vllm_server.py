"""The whole command with a server of vLLM, killed in the middle and resumed; nothing of it is left behind."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.bridge.pipelines.killed import start
from tests.bridge.pipelines.processes import assert_same_run
from tests.bridge.pipelines.vllm_words import TRUNCATED, model_folder, words
from tests.support.results import metrics

__all__ = ["model_folder", "words"]
# test_served.py shows in seconds that the tokens are the same, and that a dead server takes no request with it.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
SERVER = {**TRUNCATED, "--rollout.backend": "vllm_server", "--checkpoint-every": 1}


@pytest.fixture
def home(monkeypatch):
    """Where the servers of this test have their folders: a socket's path is short."""
    folder = tempfile.mkdtemp(prefix="rl_fn-t")
    monkeypatch.setenv("TMPDIR", folder)
    yield folder
    shutil.rmtree(folder)


def of_servers(home):
    """Processes that belong to a server with its folder in ``home``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            said = (folder / "cmdline").read_text() + (folder / "environ").read_text()
        except (PermissionError, ProcessLookupError, FileNotFoundError):
            continue
        if home in said and int(folder.name) != os.getpid():
            found.append((int(folder.name), said[:80]))
    return found


def test_a_run_with_a_server_is_killed_resumed_and_ends_as_one_with_an_engine(tmp_path, words, home, run_to_end):
    """The server draws what an engine in the trainer's process draws: same requests, same seeds, same tokens."""
    wanted = run_to_end(["train", "policy", *words("engine", **TRUNCATED)])
    command, folder = ["train", "policy", *words("server", **SERVER)], tmp_path / "server"
    # The second record of a policy's step: the third line and on.
    killed = start(command, 4, 0.2, folder / "metrics.jsonl")
    _, said = killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL, said[-3000:]
    steps = [record["step"] for record in metrics(folder) if record["stage"] == "policy"]
    assert 0 < len(steps) < 3, steps
    deadline = time.monotonic() + 30
    while left := of_servers(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    done = start([*command, "--resume"])
    _, said = done.communicate(timeout=200)
    assert done.returncode == 0, said[-3000:]
    assert not of_servers(home)
    assert_same_run(folder, wanted)
