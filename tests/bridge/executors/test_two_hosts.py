"""Jobs of two hosts (section 3 of the findings, past one machine)."""

import json
import time
import uuid

import pytest

from tests.bridge.executors.two_hosts import Loopback, TwoHosts, available, start
from tests.support.jobs import orphans

pytestmark = pytest.mark.long

NAMESPACES = available()
JOB = "tests.bridge.executors.two_hosts_job"


def ended(jobs, timeout):
    """Exit code and output of each."""
    end = time.monotonic() + timeout
    try:
        outputs = [job.communicate(timeout=max(end - time.monotonic(), 1))[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [job.returncode for job in jobs], "\n".join(outputs)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_of_two_hosts_names_folders_that_are_not_shared_and_trains_in_one_that_is(tmp_path, torchrun):
    """Each host's own name leads to 127.0.1.1, as on Debian: gloo bound to that, and the other host found itself.

    A relative folder in two working folders stands for a file system that the hosts do not share.
    """
    mark = uuid.uuid4().hex
    with TwoHosts() if NAMESPACES else Loopback() as hosts:
        folders = [tmp_path / "a", tmp_path / "b"]
        jobs = start(hosts, folders, "-m", JOB, "whole", str(tmp_path), mark=mark, torchrun=torchrun)
        codes, output = ended(jobs, 200)
    assert (codes, orphans(mark)) == ([0, 0], []), output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["total"] == [3.0, 3.0]
    if NAMESPACES:
        assert found["nodes"] == hosts.addresses and found["interfaces"] == ["eth0", "eth0"]
    refused = found["own folders"]
    assert "own/run/checkpoints is not that" in refused and f"written on {found['nodes'][1]}" in refused
    assert "absolute path" in refused and "step" not in refused
    assert found["shared folder"] == ["step-00000001"]
    assert not list(folders[0].rglob("seen-by-*")) and not list((tmp_path / "run").rglob("seen-by-*"))


@pytest.mark.slow
@pytest.mark.skipif(not NAMESPACES, reason="needs root and network namespaces")
def test_a_cut_cable_ends_a_job_with_the_cause_in_45_seconds(tmp_path):
    mark = uuid.uuid4().hex
    with TwoHosts() as hosts:
        folders = [tmp_path / "a", tmp_path / "b"]
        jobs = start(hosts, folders, "-m", JOB, "lost", str(tmp_path), mark=mark, torchrun=True)
        while not (tmp_path / "ready").exists():
            assert all(job.poll() is None for job in jobs), ended(jobs, 1)
            time.sleep(0.1)
        time.sleep(2)
        hosts.cut()
        codes, output = ended(jobs, 200)
    left = orphans(mark)
    seconds, cause = json.loads((tmp_path / "found.json").read_text())
    assert seconds < 47 and "worker of slot 1" in cause and "policy.train_step" in cause, output
    assert 0 not in codes and not left
