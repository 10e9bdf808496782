"""Killed before any call that changes what is on the disk, a run is taken up again and ends as one that was not."""

import pytest

from tests.bridge.run.moments import STEPS, killed_and_resumed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    killed, found = killed_and_resumed(tmp_path_factory.mktemp("whole") / "run", -1)
    assert not killed and [step for step, _ in found["records"]] == list(range(STEPS))
    # The lowest, which is the best, and the last two.
    assert found["checkpoints"] == ["step-00000001", "step-00000004", "step-00000006"]
    return found


def assert_ends_as_if_nothing_had_been(folder, moments, whole):
    """At each of the moments; returns how many of them there were before the run ended by itself."""
    for count, moment in enumerate(moments):
        killed, found = killed_and_resumed(folder, moment)
        assert found in ({}, whole) if moment == 0 else found == whole, moment
        if not killed:
            return count
    return len(moments)


@pytest.mark.long
def test_some_moments(tmp_path, whole):
    assert assert_ends_as_if_nothing_had_been(tmp_path / "run", range(5, 60, 45), whole) == 2


@pytest.mark.slow
def test_every_moment(tmp_path, whole):
    assert assert_ends_as_if_nothing_had_been(tmp_path / "run", range(1000), whole) >= 80
