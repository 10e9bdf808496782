"""The driver's side with two slots in threads: what is left of a failed call, and the end."""

import threading

import pytest

from rl_bridge.executors import DeadlineExceeded, Slot, driver
from rl_bridge.executors.driver import RemoteExecutor
from rl_bridge.executors.host import Host
from rl_bridge.executors.slots import Own
from tests.bridge.executors.call_scenarios import add, fail


@pytest.fixture
def executor():
    found = RemoteExecutor([Slot(0), Slot(1)], [Own(Host(0)), Own(Host(1))], timeout=30)
    yield found
    found.stop()


def test_a_slot_left_in_a_failed_call_is_given_up_with_the_first_cause(executor, monkeypatch):
    monkeypatch.setattr(driver, "ABANDONED", 0.3)
    end = threading.Event()

    def all_reduce(host):
        if host.slot == 1:
            raise ValueError("reward is NaN")
        end.wait(20)

    with pytest.raises(ValueError, match="reward is NaN") as first:
        executor.call(all_reduce, {0: (), 1: ()}, what="policy.train_step")
    assert executor.call(add, {1: (1,)}, what="add") == {1: (1, 1)}  # the other slot is free
    with pytest.raises(DeadlineExceeded, match=r"slot 0 is still in policy\.train_step, which has failed") as second:
        executor.call(add, {0: (1,), 1: (1,)}, what="policy.add")
    assert second.value.__cause__ is first.value
    assert "all_reduce" in str(second.value) and "reward is NaN" in str(second.value)
    end.set()
    assert executor.call(add, {0: (1,)}, what="add") == {0: (0, 1)}


def test_a_late_slot_is_not_given_up(executor, monkeypatch):
    monkeypatch.setattr(driver, "ABANDONED", 0.1)
    end = threading.Event()
    threading.Timer(0.5, end.set).start()
    executor.submit(lambda host: end.wait(20), {0: ()}, what="rollout.generate")
    assert executor.call(add, {0: (1,)}, what="add") == {0: (0, 1)}


def test_a_stopped_executor_takes_no_call_and_stops_once(executor):
    executor.held[0] = ["policy"]
    executor.stop()
    executor.stop()
    assert executor.stopped and executor.held == {}
    with pytest.raises(ValueError, match=r"policy\.add: this executor has been stopped"):
        executor.call(add, {0: (1,)}, what="policy.add")


def test_stop_ends_after_the_calls_under_way(executor):
    order = []
    future = executor.submit(lambda host: threading.Event().wait(0.2) or order.append("call"), {0: ()}, what="save")
    executor.stop()
    order.append("stopped")
    assert future.done() and order == ["call", "stopped"]


def test_stop_does_not_wait_for_what_will_not_end(executor):
    end = threading.Event()
    future = executor.submit(lambda host: end.wait(20), {0: ()}, what="hang")
    executor.stop(patience=0.2)
    assert not future.done()
    end.set()


def test_several_errors_of_slots_that_answer_at_once(executor):
    for _ in range(20):
        with pytest.raises((KeyError, ValueError)):
            executor.call(fail, {0: (KeyError("a"),), 1: (ValueError("b"),)}, what="step")
