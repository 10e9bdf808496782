"""ROLL-10: what a killed process leaves is removed by the next start, however soon; what a live one has stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rl_bridge.common.files
import rl_bridge.rollout
from rl_bridge.common.files import KINDS, TemporaryFolder

# Loaded from its file: nothing of the package need be imported in a process that is to be killed.
HOLDS = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("temporary", sys.argv[1])
temporary = importlib.util.module_from_spec(spec); spec.loader.exec_module(temporary)
held = [temporary.TemporaryFolder(kind, Path(sys.argv[2])) for kind in temporary.KINDS]
for folder in held:
    (folder.path / "deeper").mkdir(); (folder.path / "deeper" / "model.safetensors").write_bytes(b"weights")
    print(folder.path, flush=True)
begun, begin = os.pipe()
forked = os.fork()
if forked:
    os.read(begun, 1)  # a fork that has not run yet still holds its parent's locks
    print(forked, flush=True)
else:
    os.write(begin, b"x")
time.sleep(60)
"""


# The finalizers of weakref run behind those of later modules where one was made before them.
ENDS = """
import weakref
early = type("Early", (), {})()
weakref.finalize(early, int)
""" + "\n".join(HOLDS.strip().split("\n")[:5])


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, rl_bridge.common.files.__file__, str(tmp_path)], stdout=subprocess.PIPE
    )
    process.folders = [Path(process.stdout.readline().decode().strip()) for _ in KINDS]
    forked = int(process.stdout.readline())
    yield process
    process.kill()
    os.kill(forked, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_leaves_nothing_to_the_next_start(holder, tmp_path, kind):
    """Though a process that it has forked lives."""
    TemporaryFolder(kind, tmp_path).close()
    assert all((folder / "deeper" / "model.safetensors").is_file() for folder in holder.folders), "it lives"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    mine = TemporaryFolder(kind, tmp_path)
    assert sorted(tmp_path.iterdir()) == [mine.path]
    TemporaryFolder(kind, tmp_path).close()
    assert mine.path.is_dir(), "one's own is not swept"
    mine.close()
    mine.close()
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_leaves_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, rl_bridge.common.files.__file__, str(tmp_path)], check=True)
    assert not list(tmp_path.iterdir())


def test_the_folders_of_engines_are_of_these_kinds():
    """No other temporary folder is made for a rollout."""
    package = Path(rl_bridge.rollout.__file__).parent
    for path in package.rglob("*.py"):
        assert "mkdtemp" not in path.read_text(), path


def test_what_is_not_ours_is_left_alone(tmp_path, monkeypatch):
    strange = tmp_path / "rl_fn-vllm-1-of-somebody"
    strange.mkdir()
    (tmp_path / "rl_fn-served-link").symlink_to(strange)
    TemporaryFolder("vllm", tmp_path).close()
    assert strange.is_dir(), "no file says whose it is"
    (strange / "in_use").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        TemporaryFolder("vllm", tmp_path).close()
    assert strange.is_dir(), "of another user"


def test_a_private_folder_is_no_other_users(tmp_path):
    made = TemporaryFolder("vllm", tmp_path)
    assert made.path.stat().st_mode & 0o077 == 0
    shared = TemporaryFolder("weights", tmp_path, private=False)
    assert shared.path.stat().st_mode & 0o755 == 0o755
