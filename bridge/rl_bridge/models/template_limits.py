"""Limits of a chat template, a program of somebody else's: of time, of numbers and of characters."""

import ctypes
import functools
import math
import re
import threading
import time
from collections.abc import Callable

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols

SECONDS = 20.0
"""Seconds for one conversation."""
CHARACTERS = 1 << 25
LARGEST = 10**7
"""A number that a template may name. ``'a' * 3000000000`` is computed when the template is compiled."""
EXPONENT = 64
_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""transformers' own, around what the assistant says."""
_LOOK = 0.05
"""Seconds from one look at the clock to the next."""
_IDLE = 1.0
_deadlines: dict[int, float] = {}
"""Thread → when what it renders has to be there."""
_endless: dict[tuple[str, str], str] = {}
"""Templates that did not end with their names, and what was said of each."""
_lock = threading.Lock()
_watcher: list[threading.Thread] = []


class TooMuch(ValueError):
    """A template without an end, or with too much of it."""


class _Late(BaseException):
    """Raised in a thread that renders for too long. No part of a template can catch it."""


def bounded(render: Callable[[], str], template: str, name: str) -> str:
    """The text that ``render`` writes by the ``template``, which messages call ``name``.

    Raises:
        TooMuch: it takes longer than ``SECONDS``, names a number above ``LARGEST``, or writes too much.
    """
    if (template, name) in _endless:
        raise TooMuch(_endless[template, name])
    if (number := _largest(template)) == math.inf:
        raise TooMuch(f"{name} computes a power: an exponent in a template is a number up to {EXPONENT}")
    if number > LARGEST:
        raise TooMuch(f"{name} computes with {number}; a number in a template is at most {LARGEST}")
    try:
        _begin()
        try:
            text = render()
        except _Late:
            raise
        except BaseException:
            _settle()
            raise
        _settle()
    except _Late:
        # Rows are many, and each would take as long.
        _endless[template, name] = f"{name} did not end within {SECONDS:g} s: does it have an endless loop?"
        raise TooMuch(_endless[template, name]) from None
    if len(text) > CHARACTERS:
        raise TooMuch(f"{name} wrote {len(text)} characters of one conversation; {CHARACTERS} is the most")
    return text


@functools.lru_cache(maxsize=64)
def _largest(template: str) -> float:
    """The largest whole number that a template names; infinite where an exponent may be large.

    A power is computed in one piece, which no clock can end: 9 ** (9 ** 9) has 369 million digits.
    """
    try:
        tree = Environment(extensions=[loopcontrols]).parse(_TAG.sub("", template))
    except TemplateSyntaxError:  # rendering says so
        return 0
    if any(not _is_small(node.right) for node in tree.find_all(nodes.Pow)):
        return math.inf
    return max((abs(node.value) for node in tree.find_all(nodes.Const) if type(node.value) is int), default=0)


def _is_small(exponent: nodes.Node) -> bool:
    return isinstance(exponent, nodes.Const) and isinstance(exponent.value, int) and abs(exponent.value) <= EXPONENT


def _begin() -> None:
    with _lock:
        _deadlines[threading.get_ident()] = time.monotonic() + SECONDS
        if not _watcher:
            _watcher[:] = [threading.Thread(target=_watch, daemon=True, name="templates are watched")]
            _watcher[0].start()


def _settle() -> None:
    """Take the deadline back; if it has just passed, wait here for what is raised."""
    with _lock:
        late = _deadlines.pop(threading.get_ident(), None) is None
    while late:
        time.sleep(0.01)


def _watch() -> None:
    """In a thread, until nothing has been rendered for ``_IDLE`` seconds."""
    last = time.monotonic()
    while True:
        time.sleep(_LOOK)
        with _lock:
            now = time.monotonic()
            last = now if _deadlines else last
            if now - last > _IDLE:
                _watcher.clear()
                return
            for thread in [thread for thread, until in _deadlines.items() if now > until]:
                del _deadlines[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Late))
