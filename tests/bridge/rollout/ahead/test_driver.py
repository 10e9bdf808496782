"""What the driver's threads wait for, with a pump and an engine in hand."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest

from rl_bridge.rollout.ahead.lanes import Driver
from tests.bridge.rollout.ahead.pumps import OneCommand, Scored

pytestmark = pytest.mark.long


def test_weights_wait_for_the_call_that_the_engine_is_in():
    """A held pump gives no new command, and the one before may still be drawing with the old weights."""
    begun, go, order = threading.Event(), threading.Event(), []

    def do(command):
        begun.set()
        assert go.wait(30)
        order.append("drawn")
        return []

    driver = Driver(SimpleNamespace(do=do), OneCommand(), None, lambda groups: [])  # type: ignore[arg-type]
    try:
        assert begun.wait(30)
        holding = threading.Thread(target=lambda: (driver.hold(), order.append("held")))
        holding.start()
        holding.join(0.2)
        assert holding.is_alive()
        go.set()
        holding.join(30)
        assert order == ["drawn", "held"]
    finally:
        go.set()
        driver.close()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, ValueError, ZeroDivisionError])
def test_no_end_waits_for_a_reward_that_hangs(end, monkeypatch):
    """ROLL-11: a regular one, an interrupt or an error in the trainer's thread, an error of the engine."""
    monkeypatch.setattr("rl_bridge.rollout.ahead.lanes.GRACE", 0.05)
    begun, stop = threading.Event(), threading.Event()

    def score(groups):
        begun.set()
        stop.wait(60)
        return [[]]

    def do(command):
        assert begun.wait(60)
        if end is ZeroDivisionError:
            raise end("in the model")
        return []

    driver = Driver(SimpleNamespace(do=do), Scored(), None, score)  # type: ignore[arg-type]
    try:
        assert begun.wait(60)
        with nullcontext() if end is None else pytest.raises(end), closing(driver):
            if end is ZeroDivisionError:
                driver._threads_of[0].join(60)
                driver.hold()
            elif end is not None:
                raise end
        assert driver._rewards.is_alive(), "it hangs on"
    finally:
        stop.set()
        driver._rewards.join(60)


def test_an_interrupt_does_not_wait_for_an_engine_that_hangs(monkeypatch):
    monkeypatch.setattr("rl_bridge.rollout.ahead.lanes.GRACE", 0.05)
    begun, stop = threading.Event(), threading.Event()

    def do(command):
        begun.set()
        stop.wait(20)
        return []

    driver = Driver(SimpleNamespace(do=do), OneCommand(), None, lambda groups: [])  # type: ignore[arg-type]
    try:
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt), closing(driver):
            raise KeyboardInterrupt
        assert driver._threads_of[0].is_alive(), "it hangs on"
    finally:
        stop.set()
        driver._threads_of[0].join(60)


HANGS = """
import threading
from types import SimpleNamespace
from rl_bridge.rollout.ahead.lanes import Driver
from tests.bridge.rollout.ahead.pumps import Scored
begun = threading.Barrier(3)
def hangs(asked):
    begun.wait()
    threading.Event().wait()
driver = Driver(SimpleNamespace(do=hangs), Scored(), None, hangs)
try:
    begun.wait()
    raise KeyboardInterrupt
finally:
    driver.close()
"""


def test_nothing_that_hangs_holds_the_process_of_an_interrupted_run():
    """ROLL-11: neither a reward nor the engine. Two signals left it for ever at the interpreter's end."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300)
    # By the signal, or with status 1: Python forgets the interrupt where code at its end runs a string.
    assert ended.returncode in (-signal.SIGINT, 1) and ended.stderr.endswith("KeyboardInterrupt\n"), ended.stderr


def test_patience_begins_anew_with_each_answer_of_the_engine():
    class Busy(OneCommand):
        held = False

        def __init__(self):
            self.commands = ["advance"] * 8

        def answered(self, epoch, ended, now):
            self.held = not self.commands
            return True

    def do(command):
        time.sleep(0.1)
        return []

    pump = Busy()
    driver = Driver(SimpleNamespace(do=do), pump, None, lambda groups: [], patience=0.4)  # type: ignore[arg-type]
    try:
        driver.hold()
        assert pump.held
    finally:
        driver.close()


@pytest.mark.parametrize(("version", "starves"), [(1, True), (2, False), (3, False)])
def test_only_an_idle_engine_with_older_weights_ends_the_wait_for_a_step(version, starves):
    """With the weights of the step all of its completions are drawn, and its rewards are on their way."""

    class Idle(OneCommand):
        held = False
        ledger = SimpleNamespace(counts=dict)

        def __init__(self):
            self.commands, self.version = [], version

        def idle(self):
            return True

    training = SimpleNamespace(step=2, batch=lambda: None)
    driver = Driver(SimpleNamespace(), Idle(), training, lambda groups: [], patience=0.05)  # type: ignore[arg-type]
    waits = pytest.raises(TimeoutError, match=r"the completions of step 2")
    with closing(driver), nullcontext() if starves else waits:
        assert driver.take() is None
