"""What slots ask a cluster for, and what a cluster that lacks that is told."""

import re

import pytest

from rl_bridge.executors.placement import bundles, lacking

NODES = {"10.0.0.1": {"CPU": 8, "GPU": 2, "memory": 1e9, "node:10.0.0.1": 1.0}, "10.0.0.2": {"CPU": 4, "fast_disk": 1}}


@pytest.mark.parametrize(
    ("workers", "slots", "cluster", "expected"),
    [
        (None, None, {"CPU": 8, "GPU": 2}, ({"GPU": 1, "CPU": 1},) * 2),
        (1, None, {"CPU": 8, "GPU": 2}, ({"GPU": 1, "CPU": 1},)),
        (3, None, {"CPU": 8}, ({"CPU": 1},) * 3),
        (None, None, {"CPU": 8}, ({"CPU": 1},)),
        (None, [{"GPU": 0.5}, {"CPU": 8}], {}, ({"GPU": 0.5}, {"CPU": 8})),
        (2, [{"GPU": 1}, {"CPU": 8}], {}, ({"GPU": 1}, {"CPU": 8})),
    ],
)
def test_resources_of_each_slot(workers, slots, cluster, expected):
    assert bundles(workers, slots, cluster) == expected


@pytest.mark.parametrize(("workers", "slots"), [(0, None), (-1, None), (None, []), (None, [{}]), (3, [{"CPU": 1}])])
def test_no_slot_or_two_numbers_of_them_are_refused(workers, slots):
    with pytest.raises(ValueError, match=f"workers={workers}"):
        bundles(workers, slots, {"CPU": 8})


def test_what_fits_is_fine():
    wanted = [{"GPU": 1, "CPU": 1}] * 2 + [{"CPU": 4, "fast_disk": 1}]
    assert lacking(wanted, NODES) == ""


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([{"CPU": 1}, {"GPU": 6, "CPU": 60}], r"slot 1 needs GPU: 6, CPU: 60, and no node has that; there is "),
        ([{"GPU": 1, "fast_disk": 1}], r"slot 0 needs GPU: 1, fast_disk: 1, and no node has that"),
        (
            [{"CPU": 5}] * 3,
            r"3 slots need CPU: 15 in all; there is node 10\.0\.0\.1: CPU: 8, GPU: 2; node ",
        ),
    ],
)
def test_what_will_never_fit_is_refused_with_what_there_is(wanted, message):
    assert re.match(message, lacking(wanted, NODES))
