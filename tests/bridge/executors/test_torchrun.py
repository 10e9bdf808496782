"""The scenarios in real torchrun jobs of 1, 2 and 4 ranks, and the end of one."""

import atexit
import json
import os
import signal
import threading
from unittest.mock import Mock

import pytest
import torch

from rl_bridge.executors import Slot, WorkerDied, torchrun
from rl_bridge.executors.driver import RemoteExecutor
from rl_bridge.executors.host import Host
from rl_bridge.executors.slots import Own, Remote
from rl_bridge.executors.torchrun import TorchrunExecutor
from tests.bridge.executors.scenarios import SCENARIOS
from tests.support.jobs import run

pytestmark = pytest.mark.long


def test_usr_20_a_rank_that_is_alone_says_whom_it_waits_for(monkeypatch):
    monkeypatch.setattr(torchrun, "PATIENCE", 0.0)
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    said, words_seen = threading.Event(), []
    monkeypatch.setattr(torchrun.logger, "warning", lambda words: (words_seen.append(words), said.set()))
    with torchrun._told_while_waiting(0, 2, 300.0):
        assert said.wait(60)
    assert words_seen == ["rank 0 waits for all 2 ranks of its job at here:29500 (WORLD_SIZE=2), up to 300 s"]


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_scenario_under_torchrun(workers, tmp_path):
    result = tmp_path / "result.json"
    code, output, left = run(workers, "-m", "tests.bridge.executors.torchrun_suite", str(result))
    assert result.exists(), output
    outcomes = json.loads(result.read_text())
    assert (outcomes.pop("name"), outcomes.pop("slots")) == ("torchrun", workers)
    assert set(outcomes) == set(SCENARIOS)
    assert not (failed := {name: trouble for name, trouble in outcomes.items() if trouble}), "\n".join(failed.values())
    assert (code, left) == (0, []), output


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_rank_has_its_part_of_the_cpus_one_gpu_and_what_its_node_says(device, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("RL_BRIDGE_RESOURCES", '{"fast_disk": 1}')
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    gpu = {} if device == "cpu" else {"GPU": 1.0, "accelerator_type:H200": 1.0}
    assert torchrun._resources(torch.device(device)) == {"CPU": 2.0, "fast_disk": 1} | gpu


def test_a_death_that_is_known_at_exit_is_not_raised_again_there(monkeypatch):
    """ENG-22: torchrun's signal came while the driver ended, "Exception ignored in atexit callback"."""
    executor = TorchrunExecutor.__new__(TorchrunExecutor)
    RemoteExecutor.__init__(executor, [Slot(0)], [Own(Host(0))], timeout=30)
    executor._warned = True
    monkeypatch.setattr(executor, "_workers", {1: Mock(spec=Remote, death=WorkerDied("slot 1 ended"))})
    with pytest.raises(WorkerDied, match="slot 1 ended"):
        executor._terminated(signal.SIGTERM, None)
    monkeypatch.setattr(executor, "stop", lambda: executor._terminated(signal.SIGTERM, None))
    monkeypatch.setattr(executor, "_stuck", lambda: False)
    executor._at_exit()
    monkeypatch.undo()
    RemoteExecutor._end_workers(executor, 1.0)
    atexit.unregister(executor._at_exit)


def test_a_death_that_is_noticed_a_moment_after_the_signal_is_the_cause_all_the_same(monkeypatch):
    """On a busy machine rank 0 ended with status 143 and said no cause."""
    executor = TorchrunExecutor.__new__(TorchrunExecutor)
    dead = Mock(spec=Remote, death=None)
    for name, value in {"_workers": {1: dead}, "_exiting": False, "_warned": True}.items():
        monkeypatch.setattr(executor, name, value, raising=False)
    timer = threading.Timer(0.3, lambda: setattr(dead, "death", WorkerDied("slot 1 ended")))
    timer.start()
    monkeypatch.setattr(torchrun, "NOTICED", 60.0)
    with pytest.raises(WorkerDied, match="slot 1 ended"):
        executor._terminated(signal.SIGTERM, None)
    dead.death = None
    monkeypatch.setattr(torchrun, "NOTICED", 0.0)
    with pytest.raises(SystemExit, match="143"):
        executor._terminated(signal.SIGTERM, None)


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("whose", ["ours", "the script's"])
def test_the_end_takes_back_the_executor_s_own_handler_in_the_main_thread_alone(whose, thread, monkeypatch):
    """Python sets handlers in the main thread alone, and one that the script has installed meanwhile stays."""
    executor = TorchrunExecutor.__new__(TorchrunExecutor)
    monkeypatch.setattr(executor, "_stuck", lambda: True)
    handler = executor._terminated if whose == "ours" else lambda number, frame: None
    before, raised = signal.signal(signal.SIGTERM, handler), []

    def end():
        try:
            executor._finish()
        except ValueError as error:
            raised.append(error)

    try:
        if thread == "main":
            end()
        else:
            other = threading.Thread(target=end)
            other.start()
            other.join()
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not raised
    assert after == (signal.SIG_DFL if (whose, thread) == ("ours", "main") else handler)
