"""Connections: who is let in, what arrives, and what the end of the other side looks like."""

import os
import socket
import struct
import threading
import time

import pytest

from rl_bridge.executors import DeadlineExceeded, channel
from rl_bridge.executors.channel import Channel, Listener, connect


@pytest.fixture
def listener():
    door = Listener("127.0.0.1")
    yield door
    door.close()


@pytest.fixture
def pair(listener):
    """Both ends of a channel."""
    worker = connect([("127.0.0.1", listener.port)], listener.key, 1, {"pid": 7}, 10)
    found, greeting = listener.collect([1], 60)[1]
    assert greeting == {"pid": 7}
    yield found, worker
    found.close()
    worker.close()


def test_strangers_are_ignored(listener, monkeypatch):
    monkeypatch.setattr(channel, "_HANDSHAKE_SECONDS", 1)
    address = ("127.0.0.1", listener.port)
    silent = socket.create_connection(address)
    rude = socket.create_connection(address)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    gone = socket.create_connection(address)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()
    with pytest.raises(DeadlineExceeded, match="AuthenticationError"):
        connect([address], b"guessed", 1, None, 0.1)
    threading.Timer(0.2, lambda: connected.append(connect([address], listener.key, 1, "worker", 60))).start()
    connected: list[Channel] = []
    end, greeting = listener.collect([1], 60)[1]
    assert greeting == "worker"
    silent.settimeout(10)
    while silent.recv(1024):  # its challenge, then the end
        pass
    for thing in (silent, rude, end, *connected):
        thing.close()


def test_after_the_handshake_a_side_sends_however_long_the_other_takes(pair):
    """The handshake bounds every write, and a worker that computes reads nothing for an hour."""
    for end in pair:
        assert end._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == struct.pack("ll", 0, 0)


def test_who_did_not_come_is_named(listener):
    worker = connect([("127.0.0.1", listener.port)], listener.key, 1, None, 10)
    with pytest.raises(DeadlineExceeded, match=r"1 of 3 workers connected in 0\.5 s; slots \[2, 3\] did not"):
        listener.collect([1, 2, 3], 0.5)
    worker.close()


def test_waiting_for_workers_ends_with_what_the_check_raises(listener):
    def check():
        raise RuntimeError("actor 1 cannot be scheduled")

    with pytest.raises(RuntimeError, match="actor 1"):
        listener.collect([1], 60, check)


def test_the_first_address_that_answers_with_the_key_is_taken(listener):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    other = Listener("127.0.0.1")  # another job's
    addresses = [("127.0.0.1", nobody), ("127.0.0.1", other.port), ("127.0.0.1", listener.port)]
    worker = connect(addresses, listener.key, 3, None, 10)
    found = listener.collect([3], 10)[3][0]
    found.send(1, 2)
    assert worker.receive()[:2] == (1, 2)
    for thing in (found, worker, other):
        thing.close()


def test_nobody_at_any_address_is_said():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    with pytest.raises(DeadlineExceeded, match=rf"slot 3 cannot reach the driver in 0\.3 s: 127\.0\.0\.1:{nobody}"):
        connect([("127.0.0.1", nobody)], b"key", 3, None, 0.3)


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 3], [100], [10_000_000, 5], [3] * 2000])
def test_frames_arrive_whole(pair, sizes):
    driver, worker = pair
    parts = [os.urandom(size) for size in sizes]
    sender = threading.Thread(target=driver.send, args=(4, 2**40, parts))
    sender.start()
    kind, number, found = worker.receive()
    sender.join()
    assert (kind, number, [bytes(part) for part in found]) == (4, 2**40, parts)


def test_frames_of_several_threads_are_not_mixed(pair):
    driver, worker = pair
    threads = [
        threading.Thread(target=lambda i=i: [driver.send(0, i, [bytes([i]) * 100_000] * 3) for _ in range(5)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        _, number, parts = worker.receive()
        assert all(part == bytes([number]) * 100_000 for part in parts)
    for thread in threads:
        thread.join()


def test_the_end_of_one_side_is_the_end_of_the_stream(pair):
    driver, worker = pair
    threading.Timer(0.1, worker.close).start()
    with pytest.raises(EOFError):
        driver.receive()
    with pytest.raises(OSError):
        for _ in range(10):
            driver.send(0, 0, [b"x"])
            time.sleep(0.05)
