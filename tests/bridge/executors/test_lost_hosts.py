"""A machine that is lost is told from a process that reads nothing, with data on its way and without.

The cable between two network namespaces is cut. In the usual run the limits are of seconds, in the slow one the real
ones.
"""

import threading
import time

import pytest
import torch

from rl_bridge.executors import WorkerDied, channel
from rl_bridge.executors.calls import Call, Clock
from rl_bridge.executors.channel import Listener, connect, dumps
from rl_bridge.executors.slots import Remote
from tests.bridge.executors.two_hosts import TwoHosts, available

pytestmark = [pytest.mark.skipif(not available(), reason="needs root and network namespaces"), pytest.mark.long]

LIMIT = 45.0
REAL = pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(300)], id="real")


@pytest.fixture(params=[pytest.param(6.0, id="short"), REAL])
def limit(request, monkeypatch):
    """Seconds within which a lost machine is noticed."""
    if request.param is None:
        return LIMIT
    monkeypatch.setattr(channel, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(channel, "_LOST_SECONDS", 1.5)
    monkeypatch.setattr(channel, "_KEEPALIVE", {"KEEPIDLE": 1, "KEEPINTVL": 1, "KEEPCNT": 3})
    return request.param


@pytest.fixture
def hosts():
    with TwoHosts() as found:
        yield found


@pytest.fixture
def line(limit, hosts):
    """The driver's end of a slot on the other host, and the slot's end."""
    with hosts.within(0):
        listener = Listener(hosts.addresses[0])
    with hosts.within(1):
        worker = connect([(hosts.addresses[0], listener.port)], listener.key, 1, None, 10)
    remote = Remote(1, listener.collect([1], 10)[1][0], "test")
    listener.close()
    yield remote, worker
    remote.close()
    worker.close()


@pytest.mark.parametrize("state", ["idle", "data on its way"])
def test_a_lost_machine_is_noticed_in_45_seconds_at_both_ends(line, limit, hosts, state):
    """Section 3 of the findings: it took 123 seconds."""
    remote, worker = line
    call = Call("policy.train_step", [1], Clock())
    remote.send(call, dumps("warm-up"))
    worker.receive()
    hosts.cut()
    began, ends = time.monotonic(), []
    if state != "idle":
        remote.send(call, dumps(torch.zeros(1 << 20)))
        threading.Thread(target=worker.send, args=(3, 1, [b"x" * 1000])).start()

    def listen():
        with pytest.raises((OSError, EOFError)):
            worker.receive()
        ends.append(time.monotonic() - began)

    other = threading.Thread(target=listen)
    other.start()
    with pytest.raises(WorkerDied, match=r"slot 1 \(test\) ended during policy\.train_step: .*(answer|timed out)"):
        call.future.result(3 * limit)
    assert time.monotonic() - began < limit
    other.join(2 * limit)
    assert ends and ends[0] < limit


def test_a_process_that_reads_nothing_is_not_lost(line, limit):
    """Its machine answers: a process may hold the interpreter lock for longer than a machine may be silent."""
    remote, worker = line
    call = Call("policy.train_step", [1], Clock())
    frame = remote.send(call, dumps(torch.zeros(8 << 20)))
    with pytest.raises(TimeoutError):
        call.future.result(1.5 * limit)
    assert remote.death is None and frame.left
    assert worker.receive().kind == 0
    assert frame.settled.wait(20)
