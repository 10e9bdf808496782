"""The scenarios in real Ray actors, and what Ray alone does: places, clusters, restarts."""

import os
import re
import signal
import time

import pytest
import ray

from rl_bridge.executors import DeadlineExceeded, WorkerDied
from rl_bridge.executors import ray as ray_executor
from rl_bridge.executors.ray import RayExecutor
from tests.bridge.executors.call_scenarios import add
from tests.bridge.executors.scenarios import SCENARIOS, every, outcomes
from tests.support.jobs import run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
    # JAX warns of every fork where it has run, and Ray's processes become other programs at once.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One cluster for all tests here, with logical GPUs and a resource of its own."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        resources={"fast_disk": 1},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 2**20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def make():
    """Executors that are stopped after the test."""
    made = []

    def start(**options):
        made.append(RayExecutor(**({"timeout": 150, "start_timeout": 60} | options)))
        return made[-1]

    yield start
    for executor in made:
        executor.stop()


def free():
    found = ray.available_resources()
    return {name: found.get(name, 0) for name in ("CPU", "GPU", "fast_disk")}


ALL = {"CPU": 4, "GPU": 2, "fast_disk": 1}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_scenario_under_ray(make, workers):
    executor = make(slots=[{"CPU": 1}] * workers)
    assert (executor.name, len(executor.slots)) == ("ray", workers)
    found = outcomes(executor)
    assert set(found) == set(SCENARIOS)
    assert not (failed := {name: trouble for name, trouble in found.items() if trouble}), "\n".join(failed.values())


def test_a_slot_for_each_gpu_and_slots_with_what_they_ask_for(make):
    executor = make()
    assert [dict(slot.resources) for slot in executor.slots] == [{"GPU": 1, "CPU": 1}] * 2
    visible = executor.call(lambda host: os.environ["CUDA_VISIBLE_DEVICES"], every(executor), what="devices")
    assert sorted(visible.values()) == ["0", "1"]
    executor.stop()
    executor = make(slots=[{"CPU": 1}, {"CPU": 2, "fast_disk": 1}])
    assert free() == {"CPU": 1, "GPU": 2, "fast_disk": 0}
    executor.stop()
    wait_until_free()


def wait_until_free():
    for _ in range(100):
        if free() == ALL:
            return
        time.sleep(0.1)
    assert free() == ALL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": [{"GPU": 6, "CPU": 60}]}, r"slot 0 needs GPU: 6, CPU: 60, and no node has that; there is .*GPU: 2"),
        ({"workers": 3}, r"3 slots need GPU: 3 in all"),
    ],
)
def test_slots_that_are_not_there_are_waited_for_in_a_cluster_that_may_grow(make, caplog, options, message):
    """ENG-22: a cluster that starts nodes when they are asked for was refused."""
    with pytest.raises(DeadlineExceeded, match=r"no room for slots of .* in 1 s"):
        make(**options, start_timeout=1)
    assert re.search(message, caplog.text) and "waits 1 s for the cluster to grow" in caplog.text
    wait_until_free()


def test_slots_that_will_never_be_there_are_refused_in_a_cluster_of_our_own(monkeypatch, make):
    monkeypatch.setattr(ray_executor, "_attach", lambda *_: True)
    monkeypatch.setattr(ray_executor.ray, "shutdown", lambda: None)
    with pytest.raises(ValueError, match=r"slot 0 needs GPU: 6, CPU: 60, and no node has that; there is node .*GPU: 2"):
        make(slots=[{"GPU": 6, "CPU": 60}])
    wait_until_free()


def test_slots_in_use_are_waited_for_and_named(make):
    make(slots=[{"fast_disk": 1}])
    with pytest.raises(DeadlineExceeded, match=r"no room for slots of \{'fast_disk': 1\} in 1 s; free is \{.*'CPU': 4"):
        make(slots=[{"fast_disk": 1}], start_timeout=1)


def test_a_worker_that_does_not_start_says_why(make):
    with pytest.raises(WorkerDied, match=r"the worker of slot 0 did not start(?s:.*)pip install debugpy"):
        make(slots=[{"CPU": 1}], debug="debugpy")
    wait_until_free()


def test_a_killed_worker_is_named_and_restart_brings_all_back(make):
    executor = make(slots=[{"CPU": 1}] * 2, restarts=1)
    executor.held[0] = ["policy"]
    first = executor.call(lambda host: os.getpid(), every(executor), what="pid")
    kept = executor.submit(lambda host: signal.pause(), {0: ()}, what="rollout.generate")
    with pytest.raises(WorkerDied, match=r"slot 1 \(actor, process \d+ on .*\) ended during policy\.step: (?s:.*)died"):
        executor.call(lambda host: os.kill(os.getpid(), signal.SIGKILL), {1: ()}, what="policy.step")
    with pytest.raises(WorkerDied, match=r"slot 1"):
        executor.call(add, every(executor, 1), what="add")
    executor.restart()
    with pytest.raises(WorkerDied, match=r"slot 0 .* ended during rollout\.generate"):
        kept.result(10)
    assert executor.held == {}
    second = executor.call(lambda host: os.getpid(), every(executor), what="pid")
    assert not set(first.values()) & set(second.values())
    SCENARIOS["slots_run_at_the_same_time_and_the_driver_goes_on"](executor)
    with pytest.raises(RuntimeError, match="no restart is left"):
        executor.restart()


SCRIPT = """
import rl_bridge
executor = rl_bridge.init("ray", slots=[{"CPU": 1}] * 2)
print(executor.call(lambda host: host.slot, {0: (), 1: ()}, what="slots"))
"""

IDLE = """
import time
import psutil
import rl_bridge
executor = rl_bridge.init("ray", slots=[{"CPU": 1}])

def workers(host):
    seen, end = set(), time.monotonic() + 2  # Ray ends those that nobody needs after a second
    while time.monotonic() < end:
        for process in psutil.Process().parent().children():
            name = process.name() + " ".join(process.cmdline())
            if "default_worker" in name or ("ray::" in name and "Agent" not in name):
                seen.add(process.pid)
    return len(seen)

print("workers:", *executor.call(workers, {0: ()}, what="workers").values())
"""


def test_a_cluster_of_our_own_starts_no_process_in_advance(tmp_path):
    """A worker that still looks for Ray's servers when a killed driver takes them along outlives the driver."""
    (script := tmp_path / "script.py").write_text(IDLE)
    code, output, left = run(0, str(script), torchrun=False, RAY_ADDRESS="")
    assert (code, left) == (0, []) and "workers: 1\n" in output, output


def test_a_script_attaches_to_a_running_cluster_and_leaves_it(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"torchrun": False, "RAY_ADDRESS": cluster}
    code, output, left = run(0, str(script), **options)
    assert (code, left) == (0, []) and "{0: 0, 1: 1}" in output, output
    wait_until_free()
    code, output, left = run(0, str(script), torchrun=False, RAY_ADDRESS="")
    assert (code, left) == (0, []) and "{0: 0, 1: 1}" in output, output
    assert free() == ALL
