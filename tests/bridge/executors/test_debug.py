"""A debugger in a worker: debugpy, which an editor reaches over a port."""

import sys
import types

import pytest

from rl_bridge.executors.debug import debugger


@pytest.fixture
def calls(monkeypatch):
    """What debugpy, which is not installed here, is asked for."""
    asked = []
    fake = types.SimpleNamespace(
        listen=lambda address: asked.append(address) or ("127.0.0.1", 5678),
        wait_for_client=lambda: asked.append("wait"),
        breakpoint=lambda: asked.append("stop"),
    )
    monkeypatch.setitem(sys.modules, "debugpy", fake)
    return asked


def test_debugpy_listens_from_the_start_and_stops_at_an_exception(capsys, calls):
    stop = debugger("debugpy", 2)
    assert calls == [("127.0.0.1", 0)], "other machines stay outside"
    assert "slot 2: debugpy listens at 127.0.0.1:5678" in capsys.readouterr().err
    stop(ValueError("x"))
    assert calls[1:] == ["wait", "stop"]
    assert "slot 2: ValueError: x; it waits for debugpy" in capsys.readouterr().err


def test_without_a_debugger_nothing_listens(calls):
    assert debugger(None, 0) is None and not calls


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gdb", "debug='gdb'; there is 'debugpy'"),
        ("pdb", r"debug='debugpy' stops it where it raises.*pip install debugpy.*python -m pdb"),
        ("debugpy", "pip install debugpy"),
    ],
)
def test_a_debugger_that_is_not_there_is_refused(kind, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "debugpy", None)
    with pytest.raises(ValueError, match=message):
        debugger(kind, 0)
