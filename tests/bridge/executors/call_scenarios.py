"""Calls: order, errors, deadlines."""

import os
import signal
import tempfile
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import torch

from rl_bridge.executors import DeadlineExceeded, WorkerError
from tests.bridge.executors.registry import every, last, raised, remote, scenario, total


def add(host, x, y=0):
    return host.slot, x + y


def fail(host, what):
    raise what


def size(host, batch):
    return batch.numel()


def pid(host):
    return os.getpid()


@scenario
def results_by_slot_in_the_order_asked_for(executor):
    asked = [slot.index for slot in reversed(executor.slots)]
    found = executor.call(add, {slot: (10 * slot, 1) for slot in asked}, what="add")
    assert list(found.items()) == [(slot, (slot, 10 * slot + 1)) for slot in asked]


@scenario
def every_slot_is_a_process_with_a_device(executor):
    found = executor.call(pid, every(executor), what="pid")
    assert len(set(found.values())) == len(executor.slots)
    assert [slot.index for slot in executor.slots] == list(range(len(executor.slots)))
    assert {torch.device(slot.device).type for slot in executor.slots} <= {"cpu", "cuda"}
    assert executor.call(lambda host: str(host.device), every(executor), what="device") == {
        slot.index: slot.device for slot in executor.slots
    }


@scenario
def an_exception_arrives_with_its_class_slot_and_traceback(executor):
    slot = last(executor)
    error = raised(lambda: executor.call(fail, {slot: (KeyError("no such prompt"),)}, what="rollout.generate"))
    assert isinstance(error, KeyError)
    if executor.name != "local":
        assert isinstance(error, WorkerError) and (error.slot, error.what) == (slot, "rollout.generate")
        assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("no such prompt",)
        for words in (f"slot {slot}", "rollout.generate", "in fail", "raise what", "no such prompt"):
            assert words in str(error)
    assert executor.call(add, {slot: (1,)}, what="add") == {slot: (slot, 1)}


@scenario
def the_first_of_several_errors_is_raised_and_the_others_go_on(executor):
    arguments = {slot.index: (ValueError(f"share {slot.index}"),) for slot in executor.slots}
    assert isinstance(raised(lambda: executor.call(fail, arguments, what="step")), ValueError)
    assert set(executor.call(add, every(executor, 1), what="add")) == set(arguments)


class Unpicklable(Exception):
    def __init__(self, lock, *, code):
        super().__init__("holds a lock")
        self.lock, self.code = lock, code


class NeedsTwo(Exception):
    """Pickled by its one argument and made again from two."""

    def __init__(self, a, b):
        super().__init__(a)


@remote
def an_exception_that_cannot_travel_is_described(executor):
    slot = last(executor)

    def locked(host):
        raise Unpicklable(threading.Lock(), code=3)

    def two(host):
        raise NeedsTwo(1, 2)

    for function in (locked, two):
        error = raised(lambda f=function: executor.call(f, {slot: ()}, what="step"))
        assert isinstance(error, WorkerError) and f"in {function.__name__}" in str(error)
        assert error.__cause__ is not None


@scenario
def a_slot_runs_its_calls_one_at_a_time_in_order(executor):
    def note(host, number):
        seen = host.workers.setdefault("notes", [])
        seen.append(("begin", number))
        time.sleep(0.001)
        seen.append(("end", number))

    futures = [executor.submit(note, every(executor, number), what="note") for number in range(20)]
    wait(futures, 30)
    seen = executor.call(lambda host: host.workers.pop("notes"), every(executor), what="notes")
    in_order = [(word, number) for number in range(20) for word in ("begin", "end")]
    assert all(notes == in_order for notes in seen.values())


@scenario
def calls_from_several_threads_run_one_at_a_time(executor):
    """ENG-19: in one process, calls of three threads ran at the same time."""

    def note(host):
        seen = host.workers.setdefault("notes", [])
        seen.append("begin")
        time.sleep(0.01)
        seen.append("end")

    threads = [
        threading.Thread(target=executor.call, args=(note, every(executor)), kwargs={"what": "note"}) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = executor.call(lambda host: host.workers.pop("notes"), every(executor), what="notes")
    assert all(notes == ["begin", "end"] * 6 for notes in seen.values())


@scenario
def calls_from_several_threads_come_to_every_slot_in_one_order(executor):
    def note(host, number):
        host.workers.setdefault("notes", []).append(number)

    def drive(start):
        for number in range(start, start + 20):
            executor.submit(note, every(executor, number), what="note")

    threads = [threading.Thread(target=drive, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = list(executor.call(lambda host: host.workers.pop("notes"), every(executor), what="notes").values())
    assert len(seen[0]) == 80 and all(notes == seen[0] for notes in seen)


@remote
def slots_run_at_the_same_time_and_the_driver_goes_on(executor):
    # Each slot's own call ends when all of them are inside: one after another, they would never.
    slots = [slot.index for slot in executor.slots]

    def meet(host):
        return float(total(host, slots, 1.0))

    futures = [executor.submit(meet, {slot: ()}, what="meet") for slot in slots]
    assert [f.result(60)[slot] for f, slot in zip(futures, slots, strict=True)] == [len(slots)] * len(slots)
    future = executor.submit(lambda host: time.sleep(0.3), {last(executor): ()}, what="sleep")
    assert not future.done() and not future.cancel()
    assert future.result(30) == {last(executor): None}


@remote
def a_deadline_names_the_call_the_slots_and_where_they_are(executor):
    slot = last(executor)

    def reward_judge(host, end):
        while not os.path.exists(end):
            time.sleep(0.01)

    end = Path(tempfile.mkdtemp()) / "end"
    error = raised(lambda: executor.call(reward_judge, {slot: (str(end),)}, what="reward.score", timeout=0.3))
    assert isinstance(error, DeadlineExceeded) and isinstance(error, TimeoutError)
    for words in ("reward.score", f"slots [{slot}]", "in 0.3 s", "reward_judge"):
        assert words in str(error)
    behind = raised(lambda: executor.call(add, {slot: (1,)}, what="policy.add", timeout=0.2))
    assert "policy.add" in str(behind) and "reward.score comes first" in str(behind)
    # The slot is late, not lost.
    end.touch()
    assert executor.call(add, {slot: (1,)}, what="add", timeout=120) == {slot: (slot, 1)}


@remote
def a_process_that_reads_nothing_is_late_by_the_deadline_and_holds_up_nobody(executor):
    """ENG-17: the driver waited in the kernel, no call to any slot could be submitted, and no deadline was kept."""
    slot = last(executor)
    stopped = executor.call(pid, every(executor), what="pid")[slot]
    if stopped == os.getpid():
        return
    batch = torch.zeros(16 << 20)
    os.kill(stopped, signal.SIGSTOP)
    errors = []
    try:
        step = lambda: errors.append(raised(lambda: executor.call(size, {slot: (batch,)}, what="step", timeout=1.0)))  # noqa: E731
        began = time.monotonic()
        thread = threading.Thread(target=step)
        thread.start()
        time.sleep(0.1)
        others = {other: (1,) for other in every(executor) if other != slot}
        if others:
            executor.call(add, others, what="add", timeout=0.8)
        assert thread.is_alive() and not errors
        behind = raised(lambda: executor.call(add, {slot: (1,)}, what="policy.add", timeout=0.2))
        assert isinstance(behind, DeadlineExceeded) and "step comes first" in str(behind)
        thread.join(30)
        assert 0.9 < time.monotonic() - began < 15
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert isinstance(errors[0], DeadlineExceeded), errors
    assert "step" in str(errors[0]) and "in 1 s" in str(errors[0]) and "it does not read" in str(errors[0])
    assert executor.call(size, {slot: (batch,)}, what="size", timeout=60) == {slot: batch.numel()}


@remote
def a_result_that_cannot_be_sent_is_an_error_of_its_call(executor):
    slot = last(executor)
    if slot:  # slot 0 is the driver's own process under torchrun: nothing is sent
        error = raised(lambda: executor.call(lambda host: threading.Lock(), {slot: ()}, what="step"))
        assert isinstance(error, TypeError) and "cannot be sent" in str(error) and "lock" in str(error)
    assert executor.call(add, {slot: (1,)}, what="add") == {slot: (slot, 1)}


@remote
def arguments_that_cannot_be_sent_reach_no_slot(executor):
    arguments = every(executor, 1) | {last(executor): (threading.Lock(),)}
    if last(executor):
        error = raised(lambda: executor.call(add, arguments, what="step"))
        assert isinstance(error, TypeError) and "step" in str(error) and f"slot {last(executor)}" in str(error)
    assert set(executor.call(add, every(executor, 1), what="add")) == set(arguments)


@scenario
def a_slot_that_does_not_exist_is_refused(executor):
    for slots in ({99: (1,)}, {-1: (1,)}, {}):
        assert isinstance(raised(lambda s=slots: executor.call(add, s, what="policy.add")), ValueError)


@scenario
def idle_for_longer_than_every_timeout(executor):
    time.sleep(2.5)
    assert set(executor.call(add, every(executor, 1), what="add", timeout=5)) == set(every(executor))


@scenario
def a_function_of_the_script_travels_by_value(executor):
    factor = 3
    found = executor.call(lambda host, x: factor * x, every(executor, 2), what="lambda")
    assert set(found.values()) == {6}
