"""What JAX lowers the GPU kernels to becomes machine code, on this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[3] / "kernels" / "benchmarks" / "pallas_ahead_of_time.py"


def check(*arguments):
    # A process of its own: Triton in this one may be its interpreter.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, SCRIPT, "--check", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_product_uses_the_matrix_units():
    """The script fails where it does not, and where shared memory is too small."""
    found = check("--only", "linear bfloat16, plain", "--targets", "sm_90").splitlines()
    assert [row.split(" | ")[1] for row in found] == ["linear_logprobs_forward", "logits_logprobs_backward"]


@pytest.mark.slow
def test_every_kernel_for_every_target():
    assert len(check().splitlines()) == 8 * 2 * 6
