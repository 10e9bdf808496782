"""Loss, metrics, gradients, update: the same however workers, rows and micro-batches are arranged."""

import json
import os
import pickle

import pytest
from filelock import FileLock

from tests.bridge.invariance import comparison
from tests.bridge.invariance.scenario import LOSSES, cases

# Float32 sums in another order: the gradients' largest entries are about 0.1, log-probabilities about 3.
TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all of xdist's processes: several of them may get some of these tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "invariance"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """The first process computes, and the others wait for its results."""
    with FileLock(folder / "lock"):
        return {executor: kept_results(executor, folder) for executor in ("local", "torchrun")}


def kept_results(executor, folder):
    kept = folder / f"{executor}.pickle"
    return pickle.loads(kept.read_bytes()) if kept.exists() else comparison.results(executor, folder, "fast")


FAST = [(executor, case) for executor in ("local", "torchrun") for case in cases(executor, "fast")]


@pytest.mark.parametrize(("executor", "case"), FAST, ids=str)
def test_one_step_is_the_same(found, executor, case):
    expected = found["local"][comparison.baseline(case)]
    assert comparison.largest_gradient(expected) > 1e-3
    parts = comparison.differences(case, found[executor][case], expected)
    assert all(difference <= TOLERANCE for difference in parts.values()), parts


# Comparisons skip by the same code; tests/bridge/modules/test_preference_module.py has a loss of theirs.
SKIPPING = [(executor, case) for executor, case in FAST if case.trainer not in LOSSES]


@pytest.mark.parametrize(("executor", "case"), SKIPPING, ids=str)
def test_a_loss_that_is_not_finite_on_one_worker_is_skipped_by_all(found, executor, case):
    skipped = found[executor][case]["skipped"]
    assert skipped["skipped"] == 1.0 and 0 < skipped["grad_norm"] < float("inf")


def test_a_supervised_run_on_two_ranks_is_that_of_one(found, folder):
    one, two = (json.loads((folder / f"{executor}.sft").read_text()) for executor in ("local", "torchrun"))
    assert len(one) == len(two) == 4 and one[3]["held_out_nll"] < one[1]["held_out_nll"]
    for a, b in zip(one, two, strict=True):
        numbers = [key for key in a if not isinstance(a[key], str) and key not in ("seconds", "tokens_per_second")]
        assert a.keys() == b.keys()
        assert [b[key] for key in numbers] == pytest.approx([a[key] for key in numbers], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "torchrun", "ray"])
def test_one_step_of_every_trainer_is_the_same(executor, tmp_path):
    if executor == "ray":
        pytest.importorskip("ray")
    expected = comparison.results("local", tmp_path, "thorough")
    for case, result in comparison.results(executor, tmp_path, "thorough").items():
        parts = comparison.differences(case, result, expected[comparison.baseline(case)])
        assert comparison.all_finite(result) and all(difference <= TOLERANCE for difference in parts.values()), case
