"""Checkpoints under real torchrun, which sends SIGTERM to its ranks, and under Ray."""

import signal
import time
import uuid

import pytest

from tests.bridge.checkpoints.states import assert_errors_named, assert_goes_on_bit_for_bit, assert_same_result
from tests.support.jobs import orphans, run, start

JOB = "tests.bridge.checkpoints.job"


@pytest.mark.slow
def test_sigterm_to_torchrun_leaves_a_checkpoint_of_the_last_step(tmp_path):
    folder, whole, mark = tmp_path / "run", tmp_path / "whole", uuid.uuid4().hex
    job = start(2, "-m", JOB, "train", str(folder), "new", "slowly", "0", "0", mark=mark)
    deadline = time.monotonic() + 120
    record = folder / "metrics.jsonl"
    while not (record.exists() and len(record.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0 and orphans(mark) == []
    done = len(record.read_text().splitlines())
    newest = max(path.name for path in (folder / "checkpoints").iterdir())
    assert 3 <= done < 7 and newest == f"step-{done:08d}", output
    for where, how in ((folder, "resume"), (whole, "new")):
        code, output, left = run(2, "-m", JOB, "train", str(where), how, "nowhere", "0", "0")
        assert (code, left) == (0, []), output
    assert_same_result(folder, whole)


@pytest.mark.ray
@pytest.mark.slow
def test_checkpoints_under_ray(tmp_path):
    code, output, left = run(1, "-m", JOB, "under_ray", str(tmp_path), torchrun=False)
    assert (code, left) == (0, []), output
    assert_goes_on_bit_for_bit(tmp_path / "again")
    assert_errors_named(tmp_path / "failures")
