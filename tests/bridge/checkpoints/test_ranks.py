"""Two ranks: states that move from mesh to mesh, ranks that are killed in a step or in a checkpoint, errors of one."""

import json
import random
import shutil

import pytest

from rl_bridge.common import step_folders
from tests.bridge.checkpoints.forked import Jobs
from tests.bridge.checkpoints.states import (
    assembled,
    assert_errors_named,
    assert_goes_on_bit_for_bit,
    assert_same_result,
    assert_same_state,
)

pytestmark = pytest.mark.long

KILLED = -9


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def layouts(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    statuses, output = jobs.run("layouts", folder)
    assert statuses == [0, 0], output
    return folder


def test_a_state_is_the_same_on_every_mesh(layouts):
    first, *others = step_folders.checkpoints(layouts)
    tensors, _ = assembled(first, "policy")
    step = [value for name, value in tensors.items() if name.endswith("/step")]
    assert len(step) > 10 and all(float(value) == 3 for value in step)
    assert len(others) == 5
    for path in others:
        assert_same_state(path, first, "policy", "line")
    shards = {path.name: len(list((path / "policy").glob("*.safetensors"))) for path in [first, *others]}
    assert list(shards.values()) == [1, 2, 2, 2, 2, 1]
    # Both ranks wrote a part of what both hold.
    sizes = [file.stat().st_size for file in (others[1] / "policy").glob("*.safetensors")]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.slow
def test_a_state_is_the_same_on_meshes_of_four(jobs, tmp_path):
    statuses, output = jobs.run("layouts", tmp_path, ranks=4)
    assert statuses == [0] * 4, output
    first, *others = step_folders.checkpoints(tmp_path)
    for path in others:
        assert_same_state(path, first, "policy", "line")
    assert len(list((others[0] / "policy").glob("*.safetensors"))) == 4 and len(others) == 5
    assert_losses_of_one_worker(tmp_path)


def test_training_goes_on_as_on_one_worker(layouts):
    # Sequence ranks get other tokens, not other rows: their losses are not asked for.
    assert_losses_of_one_worker(layouts, without="4")


def assert_losses_of_one_worker(layouts, without=None):
    losses = json.loads((layouts / "losses.json").read_text())
    wanted = losses.pop("0")
    assert (losses.pop(without) if without else None) is None
    for found in losses.values():
        assert found == pytest.approx(wanted, rel=1e-5)
    assert wanted[1] < wanted[0] and losses["5"] == wanted


def test_the_same_mesh_goes_on_bit_for_bit(layouts):
    assert_goes_on_bit_for_bit(layouts / "again")


def test_an_error_of_one_rank_ends_the_checkpoint_of_all_by_name(layouts):
    assert_errors_named(layouts / "failures")


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    statuses, output = jobs.run("train", folder, "new", "nowhere", 0, 0)
    assert statuses == [0, 0], output
    return folder


def assert_goes_on(jobs, folder, whole):
    statuses, output = jobs.run("train", folder, "resume", "nowhere", 0, 0)
    assert statuses == [0, 0], output
    assert_same_result(folder, whole)


@pytest.mark.parametrize(
    ("where", "rank", "step", "newest"),
    [
        ("step", 1, 4, "step-00000004"),  # a rank, between its gradient and its update
        ("shard", 1, 3, "step-00000002"),  # a rank, before it has written its share of a checkpoint
        ("commit", 0, 5, "step-00000004"),  # the driver, when all is written and not yet named
        pytest.param("step", 0, 3, "step-00000002", marks=pytest.mark.slow),
        pytest.param("shard", 0, 5, "step-00000004", marks=pytest.mark.slow),
        pytest.param("commit", 0, 1, None, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_undisturbed(jobs, tmp_path, whole, where, rank, step, newest):
    folder = tmp_path / "run"
    statuses, output = jobs.run("train", folder, "new", where, rank, step)
    assert statuses[rank] == KILLED and statuses[1 - rank] not in (0, 124), (statuses, output)
    if rank == 1:
        assert "WorkerDied" in output
    whole_ones = step_folders.checkpoints(folder / "checkpoints")
    assert all(step_folders.damage(path) is None for path in whole_ones)
    assert [path.name for path in whole_ones][-1:] == ([newest] if newest else [])
    assert_goes_on(jobs, folder, whole)


@pytest.mark.slow
def test_killed_at_random_moments_again_and_again(jobs, tmp_path, whole):
    moments, kills, ends = random.Random(0), 0, 0
    while kills < 30 or not ends:
        folder = tmp_path / f"run-{ends}"
        begun = (folder / "config.json").exists()
        if not begun and folder.exists():
            shutil.rmtree(folder)
        after = None if kills >= 30 else moments.uniform(0.3, 2.0)
        how = "resume" if begun else "new"
        statuses, output = jobs.run("train", folder, how, "nowhere", 0, 0, kill_after=after)
        kills += KILLED in statuses
        checkpoints = step_folders.checkpoints(folder / "checkpoints")
        assert all(step_folders.damage(path) is None for path in checkpoints)
        if KILLED not in statuses:
            assert statuses == [0, 0], output
            assert_same_result(folder, whole)
            ends += 1
