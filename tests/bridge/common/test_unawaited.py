"""A coroutine that is dropped ends with all that it alone refers to, wherever they are, and harms no other one.

Each form in which a coroutine may refer to another one × who else refers to the other one.
"""

import asyncio
import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref

import pytest

from rl_bridge.common import unawaited
from rl_bridge.common.unawaited import drop
from tests.support.coroutines import never_awaited


async def later(*others, **named):
    """Refers to its arguments."""
    return "later", others, named


async def with_list(others):
    return [await other for other in others]


class Plain:
    def __init__(self, inner):
        self.inner = inner

    async def step(self):
        return await self.inner


class Slots:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    async def step(self):
        return await self.inner


class Around(Plain):
    """Its attribute refers to its step: what is freed is a cycle."""

    def __init__(self, inner):
        super().__init__(inner)
        self.second = self.step()


def closure(inner):
    async def outer():
        return await inner

    return outer()


def cell_of_a_function(inner):
    return later(lambda: inner)


def default(inner):
    async def outer(other=inner):
        return await other

    return outer()


def yielded(inner):
    return later(value for value in (inner,))


@types.coroutine
def of_a_generator(inner):
    return (yield from inner)


def deep(inner, between=lambda inner: inner):
    for _ in range(5000):
        inner = later(between(inner))
    return inner


FORMS = {
    "argument": lambda inner: waits_for(inner),
    "*args": later,
    "**kwargs": lambda inner: later(other=inner),
    "list": lambda inner: with_list([inner]),
    "twice": lambda inner: later(inner, [inner], other=inner),
    "dict": lambda inner: later({"a": {"b": inner}}),
    "set": lambda inner: later({inner}),
    "tuple": lambda inner: later((1, (2, inner))),
    "self": lambda inner: Plain(inner).step(),
    "self with slots": lambda inner: Slots(inner).step(),
    "self in a cycle": lambda inner: Around(inner).step(),
    "attribute's attribute": lambda inner: Plain(Plain(inner)).step(),
    "bound method": lambda inner: later(Plain(inner).step),
    "closure": closure,
    "closure of a function": cell_of_a_function,
    "default": default,
    "partial": lambda inner: later(functools.partial(later, inner)),
    "partial by name": lambda inner: later(functools.partial(later, other=inner)),
    "generator": yielded,
    "coroutine of a generator": lambda inner: later(of_a_generator(inner)),
    "deep": deep,
    "deep in lists": lambda inner: deep(inner, lambda inner: [inner]),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_dropped_leaves_no_warning(form):
    ended = []

    def act():
        inner = later()
        ended.append(weakref.ref(inner))
        outer = FORMS[form](inner)
        del inner
        drop(outer)

    assert never_awaited(act) == []
    assert ended[0]() is None


async def waits_for(inner):
    return await inner


class InAVariable:
    """Another conversation that will await the coroutine."""

    def __init__(self, inner):
        self.inner = inner

    def outcome(self):
        return asyncio.run(waits_for(self.inner))


class InATask:
    """A task of another conversation's loop that has not begun."""

    def __init__(self, inner):
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(waits_for(inner))

    def outcome(self):
        with contextlib.closing(self.loop):
            return self.loop.run_until_complete(self.task)


class AsATask(InATask):
    """The coroutine is a task's own one."""

    def __init__(self, inner):
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(inner)


class InACoroutine:
    """A coroutine that has not begun either."""

    def __init__(self, inner):
        self.outer = waits_for(inner)

    def outcome(self):
        return asyncio.run(self.outer)


class InAThread:
    """The stack of another thread alone refers to the coroutine."""

    def __init__(self, inner):
        self.go_on, self.values = threading.Event(), []
        self.thread = threading.Thread(target=self.run, args=(inner,))
        self.thread.start()

    def run(self, inner):
        self.go_on.wait(30)
        self.values.append(asyncio.run(inner))

    def outcome(self):
        self.go_on.set()
        self.thread.join(30)
        return self.values[0]


@pytest.mark.parametrize("other", [InAVariable, InATask, AsATask, InACoroutine, InAThread])
@pytest.mark.parametrize("form", FORMS)
def test_a_coroutine_that_another_conversation_awaits_goes_on(form, other):
    outcomes = []

    def act():
        inner = later()
        waiting = other(inner)
        outer = FORMS[form](inner)
        del inner
        drop(outer)
        del outer
        outcomes.append(waiting.outcome())

    assert never_awaited(act) == []
    assert outcomes == [("later", (), {})]


@pytest.mark.parametrize("form", FORMS)
def test_a_coroutine_that_has_begun_goes_on_with_what_it_refers_to(form):
    """Another conversation awaits it, and is suspended inside."""
    outcomes = []

    async def half(go_on):
        last = later()
        await go_on.wait()
        return await last

    async def converse():
        go_on = asyncio.Event()
        inner = half(go_on)
        task = asyncio.create_task(waits_for(inner))
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(inner) == inspect.CORO_SUSPENDED
        drop(FORMS[form](inner))
        go_on.set()
        outcomes.append(await task)

    assert never_awaited(lambda: asyncio.run(converse())) == []
    assert outcomes == [("later", (), {})]


@pytest.mark.parametrize("form", FORMS)
def test_a_coroutine_that_has_begun_and_is_freed_ends_by_its_own_finally(form):
    ends = []

    async def half():
        last = later()
        try:
            await asyncio.sleep(0)
        finally:
            ends.append(await last)

    def act():
        inner = half()
        inner.send(None)
        outer = FORMS[form](inner)
        del inner
        drop(outer)

    assert never_awaited(act) == []
    assert ends == [("later", (), {})]


class Owner(Plain):
    """Somebody else refers to the object that refers to the coroutine."""

    def __init__(self, inner):
        super().__init__(inner)
        self.others, self.named = [inner], {"other": inner}


OWNED = {
    "self": lambda owner: owner.step(),
    "argument": lambda owner: later(owner),
    "list": lambda owner: with_list(owner.others),
    "dict": lambda owner: later(owner.named),
    "bound method": lambda owner: later(owner.step),
    "attribute's attribute": lambda owner: Plain(Plain(owner)).step(),
}


@pytest.mark.parametrize("form", OWNED)
def test_a_coroutine_of_an_object_that_lives_on_can_be_awaited(form):
    outcomes = []

    def act():
        owner = Owner(later())
        drop(OWNED[form](owner))
        outcomes.append(asyncio.run(owner.step()))

    assert never_awaited(act) == []
    assert outcomes == [("later", (), {})]


def test_what_has_begun_or_ended_and_what_is_no_coroutine_stays():
    begun, ended = waits_for(asyncio.sleep(0)), later()
    begun.send(None)
    ended.close()
    for value in (begun, ended, None, [later], later):
        drop(value)
    assert inspect.getcoroutinestate(begun) == inspect.CORO_SUSPENDED
    begun.close()


def test_beyond_the_limit_nothing_ends_and_python_warns(monkeypatch):
    monkeypatch.setattr(unawaited, "LIMIT", 100)
    near = never_awaited(lambda: drop(later(*(Plain(later()) for _ in range(10)))))
    far = never_awaited(lambda: drop(later(*(Plain(later()) for _ in range(100)))))
    assert near == [] and 0 < len(far) <= 100


@pytest.mark.long
def test_the_walk_ends_before_the_modules():
    """An object of the user's may refer to everything."""
    owner = Plain(None)
    owner.everything = [sys, threading, Plain, closure, sys._getframe()]
    step = owner.step()
    objects, referents = {id(step): step}, {}
    unawaited._walk(objects, referents)
    assert len(objects) < 100
    step.close()
