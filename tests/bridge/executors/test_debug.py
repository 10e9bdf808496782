"""A debugger in a worker: reached over a port, by those who have read the word."""

import io
import re
import socket
import sys
import threading
import time
import types

import pytest

from rl_bridge.executors import debug
from rl_bridge.executors.debug import debugger


@pytest.fixture(autouse=True)
def own_breakpoint(monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)


def what_is_printed(monkeypatch):
    """By another thread, from now on. ``capsys.readouterr`` empties a buffer: what is printed meanwhile may be lost."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return sys.stderr


def announced(printed):
    """Port and word, once they are printed."""
    end = time.monotonic() + 60
    while (found := re.search(r"nc 127\.0\.0\.1 (\d+), then (\S+)\n", printed.getvalue())) is None:
        assert time.monotonic() < end, printed.getvalue()
        time.sleep(0.01)
    return int(found[1]), found[2], printed.getvalue()


def talk(port, *lines):
    """What a client that says these lines reads until the other side hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("".join(f"{line}\n" for line in lines).encode())
        found = b""
        while part := connection.recv(4096):
            found += part
    return found.decode()


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_pdb_shows_the_frames_of_the_exception(monkeypatch):
    printed = what_is_printed(monkeypatch)

    def step():
        reward = "not a number"
        raise ValueError(reward)

    def run():
        try:
            step()
        except ValueError as error:
            stop(error)

    stop = debugger("pdb", 3)
    thread = in_thread(run)
    port, word, text = announced(printed)
    assert "slot 3: ValueError: not a number" in text
    assert talk(port, "a guess") == ""
    assert "'not a number'" in talk(port, word, "p reward", "q")
    thread.join(20)
    assert not thread.is_alive()


def test_breakpoint_stops_in_the_frame_that_calls_it(monkeypatch):
    printed = what_is_printed(monkeypatch)
    seen, said = [], []

    def step():
        reward = 41
        breakpoint()
        seen.append(reward + 1)

    debugger("pdb", 1)
    thread = in_thread(step)
    port, word, text = announced(printed)
    assert "slot 1: breakpoint() at " in text and "test_debug.py" in text
    talked = in_thread(lambda: said.append(talk(port, word, "p reward", "c")))
    thread.join(20)
    talked.join(20)
    assert seen == [42] and "41" in said[0] and "step()" in said[0]


def test_a_worker_does_not_wait_for_ever(capsys, monkeypatch):
    monkeypatch.setattr(debug, "PATIENCE", 0.1)
    debugger("pdb", 0)(ValueError("x"))
    assert "nobody came in 0.1 s" in capsys.readouterr().err


def test_debugpy_listens_from_the_start_and_stops_at_an_exception(capsys, monkeypatch):
    calls = []
    fake = types.SimpleNamespace(
        listen=lambda address: ("127.0.0.1", 5678),
        wait_for_client=lambda: calls.append("wait"),
        breakpoint=lambda: calls.append("stop"),
    )
    monkeypatch.setitem(sys.modules, "debugpy", fake)
    stop = debugger("debugpy", 2)
    assert "slot 2: debugpy listens at 127.0.0.1:5678" in capsys.readouterr().err
    stop(ValueError("x"))
    assert calls == ["wait", "stop"]


@pytest.mark.parametrize("kind", ["gdb", "debugpy"])
def test_a_debugger_that_is_not_there_is_refused(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "debugpy", None)
    with pytest.raises(ValueError, match="pdb" if kind == "gdb" else "pip install debugpy"):
        debugger(kind, 0)
