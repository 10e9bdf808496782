"""The examples of docs/engines.md over two ranks, and the grid of their classes; tests/repository runs one process."""

import pickle
import signal

import numpy as np
import pytest

from tests.bridge.engines.grid import KINDS, MESHES
from tests.bridge.engines.own import PAGE
from tests.support import warm

pytestmark = pytest.mark.long

# Float32 sums in another order, as in tests/bridge/invariance; the gradients' largest entries are about 0.2.
TOLERANCE = 3e-6


def test_the_examples_and_their_classes_on_every_mesh(tmp_path):
    """ENG-2, 6, 10, 13, 20, 21: the same loss and gradients, and the same steps after a checkpoint, freed or not."""
    result = tmp_path / "found.pickle"
    done = warm.run("-m", "tests.bridge.engines.grid", str(result), count=2, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = pickle.loads(result.read_bytes())
    assert len(found) == sum(map(len, KINDS.values()))
    for (kind, name), here in found.items():
        if name == "2 sequence":
            assert f"{kind} does not say that it cuts sequences" in here
        else:
            assert_as_on_one_worker(kind, name, here, found[kind, "1"])


def assert_as_on_one_worker(kind, name, here, expected):
    assert here["loss"] == pytest.approx(expected["loss"], rel=1e-6), (kind, name)
    assert here["gradients"].keys() == expected["gradients"].keys() and len(here["gradients"]) > 10
    for key, gradient in expected["gradients"].items():
        assert np.abs(here["gradients"][key] - gradient).max() <= TOLERANCE, (kind, name, key)
    assert max(np.abs(gradient).max() for gradient in expected["gradients"].values()) > 0.1
    assert here["next"] == pytest.approx(expected["next"], rel=1e-6) and here["next"][1] < here["loss"]
    assert here["resumed"] == here["next"], (kind, name)
    assert here["on one worker"] == pytest.approx(expected["next"], rel=1e-6)
    assert "they were freed" in here["freed"] and here["eval"]
    if MESHES[name].data_parts > 1:
        assert f"1 rows for 2 shares ({MESHES[name]}), and {kind} does not say" in here["empty"]


def test_killed_and_resumed_the_classes_end_as_if_they_had_not_been(tmp_path):
    """The page's class and RLite's, ended by SIGKILL between two checkpoints: the same bits."""

    def trained(name, *kill):
        return warm.run("-m", "tests.bridge.engines.killed", str(tmp_path / name), "4", *kill)

    (tmp_path / "whole").mkdir(), (tmp_path / "killed").mkdir()
    assert trained("whole").returncode == 0
    assert trained("killed", "2").returncode == -signal.SIGKILL
    again = trained("killed")
    assert again.returncode == 0, again.stderr[-2000:]
    (start, expected), (resumed, found) = (
        pickle.loads((tmp_path / name / "weights.pickle").read_bytes()) for name in ("whole", "killed")
    )
    assert (start, resumed) == (0, 2)
    for kind, weights in expected.items():
        assert weights.keys() == found[kind].keys() and len(weights) > 10
        assert all(np.array_equal(found[kind][name], weight) for name, weight in weights.items()), kind


@pytest.mark.parametrize("word", ["colocate_with", "sync_weights", 'cuda("weights")', ".cpu(", 'cuda("kv_cache")'])
def test_the_page_shows(word):
    assert word in PAGE.read_text("utf-8")
