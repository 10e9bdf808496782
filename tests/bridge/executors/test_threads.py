"""The driver's threads: what they let go of, and that they end before the interpreter does."""

import threading
import time
import weakref

import pytest

from rl_bridge.executors import WorkerDied
from rl_bridge.executors.calls import Call, Clock
from rl_bridge.executors.channel import Listener, connect, dumps
from rl_bridge.executors.executor import worker_error
from rl_bridge.executors.serving import RESULT, STOP
from rl_bridge.executors.slots import Remote


class Batch:
    """Stands for tensors that a call or its result holds."""


@pytest.fixture
def remote():
    """The driver's end of a slot, and the slot's end of the channel."""
    listener = Listener("127.0.0.1")
    worker = connect([("127.0.0.1", listener.port)], listener.key, 1, None, 10)
    found = Remote(1, listener.collect([1], 10)[1][0], "test")
    listener.close()
    yield found, worker
    found.close()
    worker.close()


def within(seconds, true):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def lives(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_an_answered_call_is_let_go_while_the_slot_waits_for_the_next(remote):
    found, worker = remote
    batch = Batch()
    call = Call("step", [1], Clock())
    call.future.add_done_callback(lambda _, held=batch: None)
    found.send(call, dumps("function and arguments"))
    worker.send(RESULT, worker.receive().number, dumps("answer"))
    assert call.future.result(10) == {1: "answer"}
    gone = weakref.ref(batch)
    del call, batch
    assert within(10, lambda: gone() is None)


def test_a_closed_slot_has_no_thread_left(remote):
    found, _ = remote
    call = Call("step", [1], Clock())
    call.future.add_done_callback(lambda _: time.sleep(0.3))
    found.send(call, dumps("function and arguments"))
    found.close()
    assert call.future.done() and not lives("rl_bridge slot 1")


def test_the_thread_that_closes_its_own_slot_does_not_wait_for_itself(remote):
    found, worker = remote
    closed = []
    call = Call("step", [1], Clock())
    call.future.add_done_callback(lambda _: closed.append(found.close()))
    found.send(call, dumps("function and arguments"))
    worker.close()
    assert within(60, lambda: closed == [None])


def test_a_death_goes_before_the_errors_that_follow_from_it(remote, monkeypatch):
    """Also of a call that is sent while the reason of the death is looked for."""
    found, worker = remote
    looking, may = threading.Event(), threading.Event()
    monkeypatch.setattr(found, "_explain", lambda: looking.set() or (may.wait(60) and "killed"))
    calls = [Call(f"step {i}", [0, 1], Clock()) for i in range(2)]
    found.send(calls[0], dumps("function and arguments"))
    worker.close()
    assert looking.wait(60)
    found.send(calls[1], dumps("function and arguments"))
    for call in calls:
        call.fail(0, worker_error(0, call.what, RuntimeError("slot 1 did not answer"), "traceback"))
        assert not call.over
    may.set()
    for call in calls:
        with pytest.raises(WorkerDied, match=r"worker of slot 1 \(test\) ended during step 0: killed"):
            call.future.result(60)


def test_a_death_that_nobody_can_explain_ends_its_calls(remote, monkeypatch):
    found, worker = remote

    def explain():
        raise ConnectionError("Ray has been shut down")

    monkeypatch.setattr(found, "_explain", explain)
    call = Call("step", [0, 1], Clock())
    found.send(call, dumps("function and arguments"))
    worker.close()
    with pytest.raises(WorkerDied, match=r"worker of slot 1 \(test\) ended during step"):
        call.future.result(60)


def test_a_slot_that_stops_is_told_from_one_that_dies(remote):
    found, worker = remote
    found.ask_to_stop()
    assert worker.receive().kind == STOP
    worker.send(STOP, 0)
    worker.close()
    assert found.ended(10)
    found.close()
    assert "it was stopped" in str(found.death)


def test_a_stopped_clock_has_no_thread_left_and_a_function_called_is_let_go():
    clock, batch, called = Clock(), Batch(), threading.Event()
    clock.at(time.monotonic(), lambda held=batch: called.set())
    assert called.wait(10)
    gone = weakref.ref(batch)
    del batch
    assert within(10, lambda: gone() is None)
    begun = threading.Event()
    clock.at(time.monotonic(), lambda: (begun.set(), time.sleep(0.3)))
    assert begun.wait(10)
    clock.stop()
    assert not lives("rl_bridge clock")
