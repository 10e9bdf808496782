"""Examples run over Ray as they are, by the environment alone, and have the numbers of one process."""

import os
import runpy

import pytest
import ray

from rl_bridge import current_executor
from tests.examples import scripts
from tests.support import warm

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
    # JAX warns of every fork where it has run, and Ray's processes become other programs at once.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

# Loops that bring what the workers have to be sent (a loss, a class, tools), and one whose workers are of two kinds.
QUICK = ("ahead", "grpo", "own_loss", "own_model")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One cluster for all examples: to start one takes longer than an example's two steps."""
    ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    "example", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in scripts.FLAGS]
)
def test_two_workers_of_ray_have_the_numbers_of_one_process(
    example, model_folder, problems, pairs, tmp_path, monkeypatch
):
    of_this = (model_folder, problems, pairs)
    done = warm.run(*scripts.words(example, tmp_path, "one", *of_this), timeout=240)
    assert done.returncode == 0, done.stderr
    script, *flags = scripts.words(example, tmp_path, "two", *of_this)
    current_executor().stop()  # with what an earlier test of this process has left in it
    monkeypatch.setattr("sys.argv", [script, *flags])
    monkeypatch.setenv("RL_BRIDGE_EXECUTOR", "ray")
    monkeypatch.setenv("RL_BRIDGE_WORKERS", "2")
    try:
        runpy.run_path(script, run_name="__main__")
        assert current_executor().name == "ray" and len(current_executor().slots) == 2
    finally:
        current_executor().stop()
    scripts.assert_same_numbers(tmp_path, "two", example)
