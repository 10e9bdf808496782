"""The tests of collecting_alone.py: they collect all objects of their process many times."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_the_collector_in_a_process_of_its_own():
    cases = Path(__file__).with_name("collecting_alone.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
