"""Python's cyclic garbage collector runs between the phases of a step, never in the middle of one.

    with collector_waits():          # a training loop, or as its decorator
        for step in steps:
            sample()
            phase_ended()

A collection stops every thread of the process, with torch and jax loaded for hundreds of milliseconds, and so all
workers that wait for this one. In a loop it looks at what the loop has made alone. A collector that the user has
switched off stays off, and runs no more often; objects that the user froze stay frozen.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GENERATIONS = 10
"""Collections of a generation for one of the next older, as Python's own thresholds have it."""
PATIENCE = 8
"""Phases of the loop that may end while another thread is always in one: then a collection comes all the same."""


class _Collector:
    """Garbage collection of this process. Contexts nest, over threads too: the first switches it off, the last on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = self._loops = self._collections = self._waiting = 0
        self._switched_off = self._froze = False

    def enter(self, loop: bool) -> None:
        with self._lock:
            self._inside += 1
            self._loops += loop
            if self._inside == 1:
                self._switched_off = gc.isenabled()
                if self._switched_off:
                    gc.disable()

    def leave(self, loop: bool) -> None:
        with self._lock:
            self._inside -= 1
            self._loops -= loop
            self._collect_if_due()
            if self._inside or not self._switched_off:
                return
            self._switched_off, self._waiting = False, 0
            if self._froze:
                gc.unfreeze()
                self._froze = False
            gc.enable()

    def freeze(self) -> None:
        """Collect, and leave what is then there out of collections until the last context ends."""
        with self._lock:
            if self._switched_off and not self._froze and not gc.get_freeze_count():
                gc.collect()
                gc.freeze()
                self._froze = True

    def phase_ended(self) -> None:
        """Collect, if ``collector_waits`` is entered and the user has not switched the collector off.

        Where another thread is in a phase, as rollouts that run ahead are, the collection waits for the end of that
        one.
        """
        with self._lock:
            if self._switched_off:
                self._waiting += 1
                self._collect_if_due()

    def call_ended(self) -> None:
        """Collect for a worker, if this is no part of a loop or of another call."""
        with self._lock:
            if self._switched_off and self._inside == 1:
                self._collect()

    def _collect_if_due(self) -> None:
        if self._waiting and (self._inside == self._loops > 0 or self._waiting > PATIENCE):
            self._waiting = 0
            self._collect()

    def _collect(self) -> None:
        """The youngest objects, and older ones as often as Python would."""
        self._collections += 1
        gc.collect(2 if self._collections % GENERATIONS**2 == 0 else 1 if self._collections % GENERATIONS == 0 else 0)

    def collect_all(self) -> None:
        """Every cycle that nothing refers to, at once, also of what was there before the loop."""
        with self._lock:
            if self._froze:
                gc.unfreeze()
            gc.collect()
            if self._froze:
                gc.freeze()


_collector = _Collector()
phase_ended, collect_all = _collector.phase_ended, _collector.collect_all


@contextmanager
def collector_waits() -> Iterator[None]:
    """Collections happen in ``phase_ended`` alone; afterwards as before, however the body ends. Also a decorator."""
    _collector.enter(loop=True)
    _collector.freeze()
    try:
        yield
    finally:
        _collector.leave(loop=True)


@contextmanager
def one_phase() -> Iterator[None]:
    """A phase alone: a call of a worker in a process without a loop of its own. In a loop the loop collects.

    After it the collector runs if enough objects were made for Python to want that.
    """
    _collector.enter(loop=False)
    try:
        yield
    finally:
        if 0 < gc.get_threshold()[0] < gc.get_count()[0]:
            _collector.call_ended()
        _collector.leave(loop=False)
