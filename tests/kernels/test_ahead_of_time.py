"""Every Triton kernel compiles for every architecture, without spills and within its shared memory, on this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950"]


def check(*arguments: str) -> None:
    # A process of its own: the kernels of this one are the interpreter's.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = ROOT / "kernels" / "benchmarks" / "ahead_of_time.py"
    command = [sys.executable, script, "--check", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_kernel():
    """What the committed table has of the same source is taken from there; the rest is compiled."""
    check()


def test_one_kernel_anew():
    check("--again", "--only", "logits_logprobs: forward bf16")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_anew(target):
    check("--again", "--targets", target)
