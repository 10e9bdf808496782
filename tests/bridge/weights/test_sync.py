"""Weight syncs over gloo ranks: every transport between every pair of layouts."""

import json
import re
from functools import partial

import pytest

from tests.bridge.weights import grid
from tests.bridge.weights.faults import killed_half_way
from tests.bridge.weights.faults import run as faults_of_ranks
from tests.support.jobs import run
from tests.support.ranks import results

pytestmark = pytest.mark.long

# One of each transport with sharded, tensor-parallel and whole ends; the rest is slow.
FEW = [
    ("same_slot", ("shard", (0, 1)), ("tensor", (0, 1))),
    ("same_slot", ("shard", (0, 1)), ("shard", (0, 1))),
    ("same_slot", ("tensor", (0, 1)), ("copies", (1,))),
    ("broadcast", ("shard", (0, 1)), ("copies", (1,))),
    ("broadcast", ("copies", (0,)), ("tensor", (0, 1))),
    ("shared_memory", ("shard", (0, 1)), ("tensor", (0, 1))),
    ("shared_memory", ("tensor", (0, 1)), ("copies", (0,))),
    ("file", ("shard", (0, 1)), ("tensor", (0, 1))),
]


def check(count, chosen, folder):
    for _, checked, faults, litter in results(partial(grid.run, count=count, chosen=chosen), count, folder):
        assert not faults
        assert checked == 26 * len(chosen)
        assert litter == []


def test_weights_between_layouts_by_each_transport(tmp_path):
    check(2, FEW, tmp_path)


@pytest.mark.slow
def test_the_whole_grid_on_two_ranks(tmp_path):
    check(2, grid.combinations(grid.TWO), tmp_path)


@pytest.mark.slow
def test_the_whole_grid_on_four_ranks(tmp_path):
    check(4, grid.combinations(grid.FOUR), tmp_path)


def test_what_goes_wrong_between_ranks(tmp_path):
    for _, faults in results(faults_of_ranks, 2, tmp_path):
        assert not faults


def test_a_peer_that_is_killed_is_told_at_once(tmp_path):
    (_, message, seconds, version), _ = results(killed_half_way, 2, tmp_path)
    assert re.search(r"slot 0 waited for bucket \d of 23 \(.*\) to reach slots \[1\], in vain \(limit 120 s\)", message)
    assert seconds < 60
    assert version is None


@pytest.mark.slow
def test_engines_under_torchrun(tmp_path):
    result = tmp_path / "result.json"
    code, output, left = run(2, "-m", "tests.bridge.weights.torchrun_suite", str(result))
    assert result.exists(), output
    found = json.loads(result.read_text())
    wanted = found.pop("wanted")
    assert len(found) == 3 * 7 + 1
    assert {name: value for name, value in found.items() if value not in (wanted, True)} == {}
    assert (code, left) == (0, []), output


@pytest.mark.slow
def test_rollouts_of_sharded_language_models_under_torchrun(tmp_path):
    result = tmp_path / "result.json"
    code, output, left = run(4, "-m", "tests.bridge.weights.torchrun_suite", str(result))
    assert result.exists(), output
    found = json.loads(result.read_text())
    assert len(found) == 4 * 2 * 2
    assert [name for name, value in found.items() if value is not True] == []
    assert (code, left) == (0, []), output
