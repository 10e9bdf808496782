"""What the driver's threads wait for, with a pump and an engine in hand."""

import threading
import time
from types import SimpleNamespace

from rl_bridge.rollout.asynchronous.driver import Driver


class OneCommand:
    """A pump that is held at once, and has one command."""

    held = alive = True
    epoch, has_to_ask, version = 0, False, 0

    def __init__(self):
        self.commands = ["advance"]

    def hold(self):
        pass

    def next(self, now):
        return self.commands.pop() if self.commands else None

    def to_score(self):
        return []

    def answered(self, epoch, ended, now):
        return True


def test_weights_wait_for_the_call_that_the_engine_is_in():
    """A held pump gives no new command, and the one before may still be drawing with the old weights."""
    begun, go, order = threading.Event(), threading.Event(), []

    def do(command):
        begun.set()
        assert go.wait(30)
        order.append("drawn")
        return []

    driver = Driver(SimpleNamespace(do=do), OneCommand(), None, lambda group: [])  # type: ignore[arg-type]
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


def test_after_an_error_nobody_waits_for_a_reward_that_does_not_end():
    begun, stop = threading.Event(), threading.Event()

    class Scored(OneCommand):
        def to_score(self):
            return [] if begun.is_set() else ["group"]

    def score(group):
        begun.set()
        stop.wait(30)
        return []

    def do(command):
        assert begun.wait(30)
        raise ZeroDivisionError("in the model")

    driver = Driver(SimpleNamespace(do=do), Scored(), None, score)  # type: ignore[arg-type]
    closing = threading.Thread(target=driver.close)
    try:
        driver._threads_of[0].join(30)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        stop.set()
        closing.join(30)


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
    driver = Driver(SimpleNamespace(do=do), pump, None, lambda group: [], patience=0.4)  # type: ignore[arg-type]
    try:
        driver.hold()
        assert pump.held
    finally:
        driver.close()
