"""Engines whose workers join collectives, after an error in some of their processes (ENG-12).

Before, the next call paired one rank's new collective with another's old one: the driver was aborted without a
traceback, or waited for half an hour.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rl_bridge.engines import Mesh, TrainEngine, returns
from rl_bridge.engines.module import ParallelModule
from rl_bridge.executors import DeadlineExceeded, OutOfStep, WorkerError
from tests.bridge.executors.registry import every, raised, remote

SOON = 25.0
"""Seconds, of a loaded machine, for what is to be at once: timeouts are of more than a minute."""


class Meeting(ParallelModule):
    """Ranks that add numbers, each of which can be told to fail before or after it meets the others."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 2)

    def parallelize(self, mesh):
        self.group = mesh.get_group("shard")

    @returns("same")
    def add(self, value, size=1, fails=(), after=False, sleeps=0.0, waits_for=None):
        rank = dist.get_rank(self.group)
        numbers = torch.full((size,), float(value))
        for late in (False, True):
            if rank in fails and after == late:
                time.sleep(sleeps)
                while waits_for is not None and not waits_for.exists():
                    time.sleep(0.01)
                raise ValueError(f"reward is NaN in row {rank}")
            if not late:
                dist.all_reduce(numbers, group=self.group)
        return float(numbers[0])


def built(executor, slots, timeout=90.0, **wishes):
    engine = TrainEngine(Meeting, executor=executor, timeout=timeout)
    return engine.build(mesh=Mesh(shard=slots), **wishes)


def refused(engine, cause, method="add"):
    """A call is refused at once, by the first cause."""
    began = time.monotonic()
    error = raised(lambda: engine.call(method, 2.0))
    assert isinstance(error, OutOfStep), repr(error)
    assert time.monotonic() - began < SOON
    for words in (f"{engine.name}.{method} was not called", str(cause).splitlines()[0], "release()", "--resume"):
        assert words in str(error), error
    assert error.__cause__ is cause
    return error


def goes_on(executor, slots):
    """New engines in all slots are right."""
    engine = built(executor, slots)
    assert engine.add(2.0) == 2.0 * slots and engine.add(1.0, size=500) == slots
    engine.release()


@remote
def an_error_of_one_rank_ends_the_use_of_its_engine_and_of_those_that_share_its_groups(executor):
    slots = len(executor.slots)
    if slots == 1:
        return
    cases = [((slots - 1,), False), ((0,), False), ((0,), True), ((slots - 1,), True)]
    for fails, after in cases[: 4 if slots == 2 else 1]:
        engine, other = built(executor, slots), built(executor, slots)
        alone = TrainEngine(Meeting, executor=executor).build()
        assert engine.add(1.0) == other.add(1.0) == slots
        error = raised(lambda f=fails, a=after: engine.add(2.0, fails=f, after=a))  # noqa: B023
        assert isinstance(error, ValueError) and isinstance(error, WorkerError) and "reward is NaN" in str(error)
        # Another size: paired with the old collective it would abort the process.
        for engines in (engine, other, engine):
            refused(engines, error)
        assert isinstance(raised(engine.meta), OutOfStep)
        assert isinstance(raised(lambda: engine.sync_weights(alone)), OutOfStep)  # noqa: B023
        began = time.monotonic()
        engine.release(), other.release(), alone.release()
        assert time.monotonic() - began < SOON
        goes_on(executor, slots)


@remote
def calls_sent_before_the_error_is_known_are_not_run(executor):
    slots = len(executor.slots)
    if slots == 1:
        return
    for fails in ((0,), (slots - 1,))[: 2 if slots == 2 else 1]:
        engine = built(executor, slots)
        with tempfile.TemporaryDirectory() as folder:
            # The error waits until all calls are sent: a call that is sent after the error is refused in other words.
            sent = Path(folder, "sent")
            failing = {"fails": fails, "waits_for": sent}
            futures = [engine.submit("add", 1.0, size=1 + 100 * n, **(failing if n == 1 else {})) for n in range(4)]
            sent.touch()
            assert futures[0].result(90) == slots
            assert isinstance(futures[1].exception(90), ValueError)
        first, *behind = [future.exception(90) for future in futures[1:]]
        assert all(isinstance(e, OutOfStep) and "was not run" in str(e) and "reward is NaN" in str(e) for e in behind)
        refused(engine, first)
        engine.release()
        goes_on(executor, slots)


@remote
def after_the_same_error_in_all_ranks_an_engine_goes_on(executor):
    slots = len(executor.slots)
    everyone = tuple(range(slots))
    engine = TrainEngine(Meeting, executor=executor, timeout=90.0).build(mesh=Mesh(shard=slots))
    if slots == 1:
        return engine.release()
    other = built(executor, slots)
    for after in (False, True):
        error = raised(lambda a=after: engine.add(1.0, fails=everyone, after=a))
        assert isinstance(error, ValueError)
        assert engine.add(1.0, size=300) == slots and other.add(1.0) == slots
    # What is refused before it is sent is nobody's failure; nor is a result that cannot be sent.
    assert isinstance(raised(lambda: engine.call("add", no="such argument")), TypeError)
    assert engine.add(1.0, size=7) == slots
    # One that is behind the failing one in the slots already is not run; the next is.
    first, second = engine.submit("add", 1.0, fails=everyone), engine.submit("add", 1.0)
    assert isinstance(first.exception(90), ValueError) and isinstance(second.exception(90), OutOfStep | type(None))
    assert engine.add(1.0, size=11) == slots
    return engine.release(), other.release()


@remote
def a_deadline_that_passed_ends_the_use_of_an_engine(executor):
    slots = len(executor.slots)
    if slots == 1:
        return
    engine = built(executor, slots, timeout=20.0)
    engine._timeout = 0.5
    error = raised(lambda: engine.add(1.0, fails=(slots - 1,), sleeps=1.5))
    assert isinstance(error, DeadlineExceeded)
    refused(engine, error)
    engine.release()
    goes_on(executor, slots)


@remote
def engines_of_other_slots_are_not_concerned(executor):
    slots = len(executor.slots)
    if slots < 4:
        return
    first, second = built(executor, 2), built(executor, 2)
    assert not {*first.slots} & {*second.slots}
    error = raised(lambda: first.add(1.0, fails=(1,)))
    refused(first, error)
    assert second.add(1.0) == 2.0
    # An engine that is built where another is out of step gets groups of its own.
    first.release()
    wide = built(executor, slots)
    assert wide.add(1.0) == slots and second.add(1.0) == 2.0
    wide.release(), second.release()


@remote
def a_build_that_fails_in_one_rank_leaves_its_slots_to_the_next(executor):
    slots = len(executor.slots)
    if slots == 1:
        return

    def factory():
        if dist.get_rank() == slots - 1:
            raise FileNotFoundError("model.safetensors")
        return Meeting()

    error = raised(lambda: TrainEngine(factory, executor=executor, timeout=60.0).build(mesh=Mesh(shard=slots)))
    assert isinstance(error, FileNotFoundError)
    goes_on(executor, slots)
    assert set(executor.call(lambda host: len(host.workers), every(executor), what="workers").values()) == {0}


@remote
def engines_built_one_after_another_leave_neither_descriptors_nor_threads(executor):
    """ENG-22: each build with a mesh left four descriptors and three threads."""
    slots = len(executor.slots)
    if slots > 2:
        return
    counts = []
    for _ in range(5):
        engine = built(executor, slots)
        counts.append(executor.call(open_things, every(executor), what="count"))
        engine.release()
    assert all(count == counts[0] for count in counts[1:]), counts


def open_things(host):
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
