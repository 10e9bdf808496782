"""What the driver sends to a process that reads nothing, slowly, or not to the end."""

import threading
import time

import pytest
import torch

from rl_bridge.executors import DeadlineExceeded, Slot, WorkerDied
from rl_bridge.executors.channel import Listener, connect, dumps, loads
from rl_bridge.executors.driver import RemoteExecutor
from rl_bridge.executors.host import Host
from rl_bridge.executors.serving import RESULT
from rl_bridge.executors.slots import Own, Remote
from tests.bridge.executors.call_scenarios import add, size

LARGE = 8 << 20


@pytest.fixture
def job():
    """An executor of a slot in a thread and one behind a channel, and that slot's end of the channel."""
    listener = Listener("127.0.0.1")
    worker = connect([("127.0.0.1", listener.port)], listener.key, 1, None, 10)
    remote = Remote(1, listener.collect([1], 10)[1][0], "test")
    listener.close()
    executor = RemoteExecutor([Slot(0), Slot(1)], [Own(Host(0)), remote], timeout=30)
    yield executor, worker
    worker.close()
    executor.stop(patience=0.1)


def arguments_of(frame):
    return loads(frame.parts)[1]


def test_the_deadline_counts_while_the_driver_sends_and_other_slots_are_not_held_up(job):
    """ENG-17."""
    executor, worker = job
    batch = torch.full((LARGE,), 1.0)
    errors = []

    def step():
        with pytest.raises(DeadlineExceeded, match=r"step: no answer from slots \[1\] in 0\.6 s") as caught:
            executor.call(size, {1: (batch,)}, what="step", timeout=0.6)
        errors.append((time.monotonic() - began, caught.value))

    began = time.monotonic()
    thread = threading.Thread(target=step)
    thread.start()
    while executor._workers[1]._outbox.stuck() is None:
        time.sleep(0.01)
    assert executor.call(add, {0: (1,)}, what="add", timeout=10) == {0: (0, 1)}
    # The slot's own next call waits behind, and its deadline is kept by the same clock.
    with pytest.raises(DeadlineExceeded, match=r"policy\.add(?s:.*)step comes first"):
        executor.call(add, {1: (1,)}, what="policy.add", timeout=0.1)
    thread.join(20)
    seconds, error = errors[0]
    assert 0.5 < seconds < 5 and "it does not read" in str(error) and "of the 33.6 MB" in str(error)
    # Whoever made the call may write over its arguments now; what the process reads later is what was sent.
    batch.fill_(2.0)
    assert float(arguments_of(worker.receive())[0].sum()) == LARGE
    worker.receive()
    answered = executor.submit(add, {1: (1,)}, what="add", timeout=20)
    worker.send(RESULT, worker.receive().number, dumps("answer"))
    assert answered.result(20) == {1: "answer"}


def test_arguments_may_change_as_soon_as_submit_returns(job):
    executor, worker = job
    batches = [torch.full((LARGE // 4,), float(number)) for number in range(3)]
    read = []
    thread = threading.Thread(target=lambda: read.extend(arguments_of(worker.receive()) for _ in batches))
    thread.start()
    for batch in batches:
        executor.submit(size, {1: (batch,)}, what="step")
        batch.fill_(-1.0)
    thread.join(20)
    assert [float(batch[0][0]) for batch in read] == [0.0, 1.0, 2.0]
    assert all(bool((batch == batch[0]).all()) for (batch,) in read)


def test_a_process_that_dies_while_it_is_sent_to_fails_the_call_at_once(job):
    executor, worker = job
    threading.Timer(0.2, worker.close).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="slot 1"):
        executor.call(size, {1: (torch.zeros(LARGE),)}, what="step")
    assert time.monotonic() - began < 10


def test_stop_does_not_wait_for_what_is_not_read(job):
    executor, _ = job
    thread = threading.Thread(
        target=lambda: executor.submit(size, {1: (torch.zeros(LARGE),)}, what="step").exception(20)
    )
    thread.start()
    while executor._workers[1]._outbox.stuck() is None:
        time.sleep(0.01)
    executor.stop(patience=0.2)
    thread.join(20)
    names = ("rl_bridge to slot 1", "rl_bridge slot 1", "rl_bridge late")
    assert not thread.is_alive() and not [t for t in threading.enumerate() if t.name in names]
