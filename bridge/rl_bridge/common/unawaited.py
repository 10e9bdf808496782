"""The end of coroutines that nobody will await: Python warns of each that is freed before it has begun."""

import gc
import inspect
import sys
from asyncio import AbstractEventLoop, Future
from collections import Counter, deque
from collections.abc import Mapping
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

LIMIT = 20_000
"""Objects that are looked at for one coroutine, the nearest first."""
_OTHERS = (type, ModuleType, FrameType, Future, AbstractEventLoop, AsyncGeneratorType)
"""Objects of these classes are others' too, with all that they refer to."""


def drop(awaitable: Any) -> None:
    """End a coroutine that has not begun, and all that have not begun and would be freed with it.

    A coroutine that anything else refers to stays: another conversation may await it. One that has begun stays too,
    with all that it refers to: its ``finally`` may need them while Python frees it. Python warns of coroutines that
    are further than ``LIMIT`` objects away.

    >>> async def inner(): ...
    >>> async def outer(*others): return [await other for other in others]
    >>> shared = inner()
    >>> dropped = outer(outer(inner()), shared)
    >>> drop(dropped)
    >>> inspect.getcoroutinestate(dropped), inspect.getcoroutinestate(shared)
    ('CORO_CLOSED', 'CORO_CREATED')
    >>> shared.close()
    """
    if _waits_to_begin(awaitable):
        # All are referred to before the first is closed: its frame would free the next one.
        for coroutine in [awaitable, *_freed_with(awaitable)]:
            coroutine.close()


def _waits_to_begin(value: Any) -> bool:
    return isinstance(value, CoroutineType) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED


def _freed_with(root: Any) -> list[Any]:
    """The coroutines that have not begun and that nothing refers to but ``root`` and what is freed with ``root``."""
    objects = {id(root): root}
    referents: dict[int, list[int]] = {}
    _walk(objects, referents)
    inside = Counter(key for keys in referents.values() for key in keys)
    stay = {key for key, count in _references(objects).items() if count - _OWN != inside[key]} - {id(root)}
    waiting = deque(stay)
    while waiting:
        reached = set(referents.get(waiting.popleft(), ())) - stay - {id(root)}
        stay |= reached
        waiting += reached
    return [value for key, value in objects.items() if key not in stay and value is not root and _waits_to_begin(value)]


def _walk(objects: dict[int, Any], referents: dict[int, list[int]]) -> None:
    """Fill in the objects that the first one refers to, in their turn, and the keys of each one's referents."""
    waiting = deque(objects)
    while waiting and len(objects) < LIMIT:
        key = waiting.popleft()
        values = _referents(objects[key])
        referents[key] = [id(value) for value in values]
        for value in values:
            if id(value) not in objects:
                objects[id(value)] = value
                waiting.append(id(value))


def _referents(value: Any) -> list[Any]:
    """Objects that a value refers to, each as often as the value does, without those that are others' in any case."""
    if isinstance(value, _OTHERS) or (isinstance(value, CoroutineType | GeneratorType) and not _begins(value)):
        return []
    beside = (id(value.__globals__), id(value.__builtins__)) if isinstance(value, FunctionType) else ()
    return [one for one in gc.get_referents(value) if gc.is_tracked(one) and id(one) not in beside]


def _begins(value: Any) -> bool:
    if isinstance(value, GeneratorType):
        return inspect.getgeneratorstate(value) == inspect.GEN_CREATED
    return inspect.getcoroutinestate(value) == inspect.CORO_CREATED


def _references(objects: Mapping[int, Any]) -> dict[int, int]:
    return {key: sys.getrefcount(objects[key]) for key in objects}


_OWN = _references({0: object()})[0]
"""References to an object that nothing but such a mapping refers to."""
