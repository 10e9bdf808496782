"""Every Triton kernel compiles for every architecture, without spills and within its shared memory, on this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950"])
def test_compiles(target):
    # A process of its own: the kernels of this one are the interpreter's.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = ROOT / "kernels" / "benchmarks" / "ahead_of_time.py"
    result = subprocess.run(
        [sys.executable, script, "--check", "--targets", target], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
