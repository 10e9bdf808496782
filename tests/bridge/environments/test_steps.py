import asyncio
import concurrent.futures
import contextlib
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.common import event_loop
from rl_bridge.environments.environment import Session, Step
from rl_bridge.environments.environment_calls import ThreadedSteps
from rl_bridge.rewards import load
from tests.support.coroutines import never_awaited
from tests.support.reward_batches import trajectories


def all_of(steps, count):
    found = []
    while len(found) < count:
        found += steps.finished(wait=True)
    return {finished.key: finished for finished in found}


def test_calls_and_coroutines_run_side_by_side_and_each_finishes_by_its_key():
    together = threading.Barrier(3, timeout=30)

    def call(value):
        together.wait()
        return value

    async def coroutine(value):
        await asyncio.to_thread(together.wait)
        return value

    with ThreadedSteps(limit=30) as steps:
        steps.start("a", lambda: call(1))
        steps.start("b", lambda: call(2))
        steps.start("c", lambda: coroutine(3))
        found = all_of(steps, 3)
        assert {key: (f.value, f.error) for key, f in found.items()} == {"a": (1, None), "b": (2, None), "c": (3, None)}
        assert steps.finished(wait=False) == [] and steps.finished(wait=True) == []


def test_all_coroutines_share_an_event_loop_and_none_outlives_its_conversations():
    ended = threading.Event()

    async def loop():
        return asyncio.get_running_loop()

    async def runs_on():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loops = []
    for _ in range(2):
        with ThreadedSteps(limit=30) as steps:
            for number in range(2):
                steps.start(number, loop)
                loops.append(all_of(steps, 1)[number].value)
            steps.start("runs on", runs_on)
            while not any(call.begun for call in steps._coroutines):
                time.sleep(0.001)
        assert ended.wait(30)
        ended.clear()
    assert len(set(loops)) == 1


def test_a_coroutine_that_stops_the_event_loop_stops_no_later_one(monkeypatch):
    monkeypatch.setattr(event_loop, "PATIENCE", 0.05)
    released, loops = threading.Event(), []

    async def computes():
        loops.append(asyncio.get_running_loop())
        released.wait()

    with ThreadedSteps(limit=0.05) as steps:
        steps.start("computes", computes)
        assert isinstance(all_of(steps, 1)["computes"].error, TimeoutError)
        while not loops:
            time.sleep(0.001)
    deadline = time.monotonic() + 60
    while event_loop._here.kinds["environment"].loop.events is loops[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with ThreadedSteps(limit=30) as steps:
        steps.start("next", lambda: asyncio.sleep(0, "fine"))
        assert all_of(steps, 1)["next"].value == "fine"
    released.set()


@pytest.fixture
def at_once():
    """Calls in threads, and an event that ends all that blocks."""
    released = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        try:
            yield pool.submit, released
        finally:
            released.set()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


KINDS = ("reward", "environment")


@pytest.mark.parametrize("stopped", KINDS)
def test_a_coroutine_that_stops_its_loop_stops_none_of_the_other_kind(stopped, at_once):
    submit, released = at_once
    blocks = threading.Event()

    async def computes():
        blocks.set()
        released.wait()
        return "late"

    late = submit(event_loop.run, computes(), stopped)
    assert blocks.wait(60)
    (other,) = {*KINDS} - {stopped}
    assert submit(event_loop.run, asyncio.sleep(0, "fine"), other).result(60) == "fine"
    assert submit(lambda: list(event_loop.run_in_order([asyncio.sleep(0, 1)], other))).result(60) == [(1, None)]
    released.set()
    assert late.result(60) == "late"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", ["cancelled", "overdue"])
def test_a_loop_that_a_given_up_call_has_stopped_is_not_handed_out(kind, ended, at_once, monkeypatch):
    """The call that follows within milliseconds got the stopped loop, and waited for ever or was cancelled with it.

    One call runs in the loop already, one waits for its turn, and one comes right after the end.
    """
    monkeypatch.setattr(event_loop, "PATIENCE", 0.05)
    submit, released = at_once
    blocks, runs, calls = threading.Event(), threading.Event(), set()

    async def computes():
        blocks.set()
        released.wait()

    async def innocent():
        runs.set()
        while not released.is_set():
            await asyncio.sleep(0.001)
        return "fine"

    async def loop_of():
        return asyncio.get_running_loop()

    before = submit(event_loop.run, innocent(), kind)
    assert runs.wait(60)
    stopped = event_loop._here.kinds[kind].loop
    # A limit that ends before the block begins would stop nothing.
    stuck = submit(event_loop.run, computes(), kind, None, calls)
    assert blocks.wait(60)
    waiting = submit(event_loop.run, loop_of(), kind)
    until(lambda: stopped.waiting)
    if ended == "cancelled":
        event_loop.cancel(calls)
    else:
        with pytest.raises(TimeoutError):
            event_loop.run(loop_of(), kind, 0.01)
    after = submit(event_loop.run, loop_of(), kind)
    assert waiting.result(60) is after.result(60) is not stopped.events
    assert not before.done(), "a call that has begun goes on where it is"
    released.set()
    assert before.result(60) == "fine"
    assert (type(stuck.exception(60)).__name__ == "CancelledError") == (ended == "cancelled")
    until(stopped.events.is_closed)
    assert not stopped.answers(), "a loop that has ended is no error"


def test_results_come_in_order_and_each_end_is_progress():
    """A coroutine may wait for all others: the limit of a result begins anew with the end of any."""
    events = []

    async def waits(own, others):
        if others is not None:
            await others.wait()
        own.set()
        return "value"

    with event_loop.of_this_thread(lambda: events.append("progress")):
        done = [asyncio.Event() for _ in range(4)]
        chain = [waits(own, others) for own, others in zip(done, [*done[1:], None], strict=True)]
        for value, error in event_loop.run_in_order(chain, "reward"):
            events.append((value, error))
        assert event_loop.run(asyncio.sleep(0, "next"), "reward") == "next"
    # The last coroutine ends first. The first result is there when all have ended.
    assert events[:3] == ["progress"] * 3 and sorted(map(str, events)) == ["('value', None)"] * 4 + ["progress"] * 4


async def hangs_in_a_coroutine():
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_call_that_hangs_is_given_up_and_its_place_is_the_next_one_s(kind):
    released = threading.Event()
    hang = released.wait if kind == "thread" else hangs_in_a_coroutine
    with ThreadedSteps(limit=0.2, at_once=1) as steps:
        steps.start("hangs", hang)
        steps.start("next", lambda: "fine")
        found = all_of(steps, 2)
        assert isinstance(found["hangs"].error, TimeoutError) and "took longer than 0.2 s" in str(found["hangs"].error)
        assert (found["next"].value, found["next"].error) == ("fine", None)
        released.set()
        time.sleep(0.05)
        assert steps.finished(wait=False) == [], "what comes too late counts for nothing"


@pytest.mark.parametrize(
    "error, seen",
    [(ValueError("no"), "ValueError"), (SystemExit(3), "SystemExit"), (asyncio.CancelledError(), "CancelledError")],
)
def test_whatever_an_environment_raises_is_its_result(error, seen):
    async def coroutine():
        raise error

    def call():
        raise error

    with ThreadedSteps(limit=30) as steps:
        steps.start("call", call)
        assert type(all_of(steps, 1)["call"].error) is type(error)
        steps.start("coroutine", coroutine)
        assert type(all_of(steps, 1)["coroutine"].error).__name__ == seen
        steps.start("after", lambda: asyncio.sleep(0, "still there"))
        assert all_of(steps, 1)["after"].value == "still there"


def test_no_more_calls_at_once_than_asked_for():
    now, most, lock = [0], [0], threading.Lock()

    def call():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1

    with ThreadedSteps(limit=30, at_once=3) as steps:
        for number in range(12):
            steps.start(number, call)
        all_of(steps, 12)
    assert most[0] == 3


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": float("nan")}, {"limit": 1, "at_once": 0}])
def test_limits_that_allow_nothing_are_refused(options):
    with pytest.raises(ValueError, match="limit must be > 0 s and at_once ≥ 1"):
        ThreadedSteps(**options)


def test_an_environment_may_be_asynchronous():
    class Echo:
        async def reset(self, row):
            return [{"role": "user", "content": row["prompt"]}]

        async def step(self, messages):
            return "not a step"

    session = Session(Echo)
    with ThreadedSteps(limit=30) as steps:
        steps.start("reset", lambda: session.reset({"prompt": "q"}))
        assert all_of(steps, 1)["reset"].value.messages == [{"role": "user", "content": "q"}]
        steps.start("step", lambda: session.step([]))
        error = all_of(steps, 1)["step"].error
    assert isinstance(error, TypeError) and "step() returned 'not a step', expected a Step" in str(error)


SCALARS = {
    "float": float,
    "bool": lambda value: bool(value) if value in (0, 1) else value,
    "numpy": np.float32,
    "numpy whole": lambda value: np.int64(value) if value == int(value) else np.float64(value),
    "numpy bool": lambda value: np.bool_(value) if value in (0, 1) else np.float16(value),
    "numpy array": np.array,
    "torch": torch.tensor,
    "jax": jnp.float32,
}


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_a_step_has_the_numbers_of_every_library_as_a_reward_has(kind, value):
    """Every success, `np.float32(1.0)`, was an error of the environment, and the policy was trained on failures."""
    number = SCALARS[kind](value)

    class Scores:
        def reset(self, row):
            return Step(messages=[{"role": "user", "content": "q"}], state_id=np.int64(3))

        def step(self, messages):
            return Step(reward=number, done=np.bool_(True), state_id=torch.tensor(4))

    session = Session(Scores)
    opening, step = session.reset({}), session.step([])
    assert (step.reward, step.state_id, step.done, opening.state_id, opening.reward) == (value, 4, True, 3, None)
    assert [type(part) for part in (step.reward, step.state_id, step.done)] == [float, int, bool]
    assert load(lambda completion, row: number).score(trajectories("2"))[0].rewards == {"reward": step.reward}


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": np.float32("nan")},
        {"reward": np.float64(1e300)},
        {"reward": 10**400},
        {"reward": np.ones(1)},
        {"reward": "1"},
        {"reward": 1j},
        {"state_id": np.float32(3)},
        {"state_id": np.int64(-1)},
        {"state_id": "3"},
    ],
    ids=str,
)
def test_what_is_no_number_of_a_step_is_refused(fields):
    class Odd:
        def reset(self, row):
            return [{"role": "user", "content": "q"}]

        def step(self, messages):
            return Step(**fields)

    session = Session(Odd)
    session.reset({})
    expected = (
        "expected an integer ≥ 0 or None" if "state_id" in fields else "expected a finite number or None, up to 3.4"
    )
    with pytest.raises(ValueError, match=expected):
        session.step([])


def nested():
    """A coroutine with two inside, none of which has begun."""

    async def innermost():
        return 1

    async def inner(other):
        return await other

    async def outer():
        return await held

    held = inner(innermost())
    return outer()


def test_a_coroutine_that_comes_after_the_end_leaves_no_warning():
    """A step that returns while the conversations end, as where another one cannot be called in a thread."""
    over, ended = threading.Event(), threading.Event()

    def late():
        over.wait(30)
        return nested()

    def act():
        with ThreadedSteps(limit=30) as steps:
            run, steps._run = steps._run, lambda *parts: (run(*parts), ended.set())  # type: ignore[method-assign]
            steps.start("late", late)
        over.set()
        assert ended.wait(30)

    assert never_awaited(act) == []


@pytest.mark.long
def test_a_coroutine_that_is_given_up_before_it_begins_leaves_no_warning():
    """The loop is busy with another one; the calls' limit comes first."""
    begun, go_on = threading.Event(), threading.Event()

    async def busy():
        begun.set()
        go_on.wait(30)

    def waits(calls):
        with contextlib.suppress(concurrent.futures.CancelledError):
            event_loop.run(nested(), "environment", None, calls)

    def act():
        waiting: event_loop.Calls = set()
        first = threading.Thread(target=event_loop.run, args=(busy(), "environment"))
        first.start()
        assert begun.wait(30)
        second = threading.Thread(target=waits, args=(waiting,))
        second.start()
        while not waiting:
            time.sleep(0.01)
        event_loop.cancel(waiting)
        go_on.set()
        first.join()
        second.join()

    assert never_awaited(act) == []
