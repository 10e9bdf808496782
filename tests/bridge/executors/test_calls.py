"""Errors of a call: which of several is the cause, and what an error is to the caller."""

import pickle
import threading
import time

import pytest

from rl_bridge.executors import WorkerDied, WorkerError
from rl_bridge.executors.calls import Call, Clock, first_cause
from rl_bridge.executors.executor import worker_error
from rl_bridge.executors.serving import decode_error, encode_error, where


@pytest.fixture
def clock():
    clock = Clock()
    yield clock
    clock.stop()


def failed(slot, cause):
    return worker_error(slot, "step", cause, "traceback")


GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([failed(0, GLOO), WorkerDied("slot 1 ended")], 1),
        ([failed(0, ValueError("nan")), WorkerDied("slot 1 ended")], 1),
        ([failed(0, GLOO), failed(1, ValueError("nan"))], 1),
        ([failed(0, ValueError("nan")), failed(1, KeyError("x"))], 0),
        ([failed(0, GLOO), failed(1, GLOO)], 0),
        ([failed(0, RuntimeError("shapes do not match")), failed(1, GLOO)], 0),
    ],
)
def test_the_cause_is_told_from_its_consequences(errors, expected):
    assert first_cause(errors) is errors[expected]


def test_a_consequence_waits_for_its_cause(clock):
    call = Call("step", [0, 1], clock)
    call.fail(0, failed(0, GLOO))
    assert not call.future.done()
    call.fail(1, WorkerDied("slot 1 ended"))
    with pytest.raises(WorkerDied):
        call.future.result(0)


def test_a_consequence_without_a_cause_is_raised_after_a_moment(clock, monkeypatch):
    monkeypatch.setattr("rl_bridge.executors.calls._GRACE", 0.1)
    call = Call("step", [0, 1], clock)
    call.fail(0, failed(0, GLOO))
    with pytest.raises(WorkerError, match="Connection closed"):
        call.future.result(5)


@pytest.mark.parametrize("lost_first", [True, False])
@pytest.mark.parametrize("cause", [GLOO, ValueError("slot 1 did not answer")])
def test_an_error_waits_for_the_news_of_a_death(clock, monkeypatch, cause, lost_first):
    """Ray may take longer to say why a process is gone than its peers take to miss the process."""
    monkeypatch.setattr("rl_bridge.executors.calls._GRACE", 0.05)
    call = Call("step", [0, 1, 2], clock)
    if lost_first:
        call.lose(1)
    call.fail(0, failed(0, cause))
    if cause is GLOO:
        call.lose(1)
        time.sleep(0.2)
    assert call.over == (cause is not GLOO and not lost_first)
    call.fail(1, WorkerDied("slot 1 ended"))
    assert isinstance(call.future.exception(0), WorkerDied if cause is GLOO or lost_first else ValueError)


def test_an_error_does_not_wait_for_the_other_slots(clock):
    call = Call("step", [0, 1], clock)
    call.fail(1, failed(1, ValueError("nan")))
    with pytest.raises(ValueError, match="nan"):
        call.future.result(0)
    assert call.over and call.waiting == [0]
    call.succeed(0, "late")
    call.abandon(TimeoutError())
    assert isinstance(call.future.exception(), WorkerError)


def test_the_clock_calls_in_order_of_time_and_forgets_what_is_taken_back(clock):
    """However late: while one function runs, others become due, in another order than that of their times."""
    seen, running, may, done = [], threading.Event(), threading.Event(), threading.Event()
    now = time.monotonic()
    clock.at(now, lambda: (running.set(), may.wait(60)))
    assert running.wait(60)
    clock.at(now + 3600, lambda: seen.append("in an hour"))
    clock.at(now + 0.004, lambda: (seen.append("fourth"), done.set()))
    clock.at(now + 0.002, lambda: (seen.append("second"), take_back()))
    clock.at(now + 0.001, lambda: seen.append("first"))
    clock.at(now + 0.002, lambda: seen.append("third"))
    clock.at(now + 0.001, lambda: seen.append("taken back while another runs"))()
    take_back = clock.at(now + 0.003, lambda: seen.append("taken back by one that was due before"))
    while time.monotonic() < now + 0.004:
        pass
    may.set()
    assert done.wait(60)
    assert seen == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(
    "cause", [ValueError("x"), KeyError("x"), OSError(5, "x"), UnicodeDecodeError("a", b"", 0, 1, "x")]
)
def test_an_error_is_of_its_cause_s_class_too(cause):
    error = failed(2, cause)
    assert isinstance(error, WorkerError) and isinstance(error, type(cause)) and error.__cause__ is cause
    assert str(error).startswith(f"step raised {type(cause).__name__} in slot 2: {cause}")
    assert type(failed(1, cause)) is type(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is WorkerError and str(copy) == str(error) and copy.slot == 2


@pytest.mark.parametrize(
    "cause", [SystemExit(0), KeyboardInterrupt(), StopIteration(3), ExceptionGroup("g", [OSError()])]
)
def test_what_would_end_the_driver_or_cannot_be_a_base_class_stays_a_cause(cause):
    error = failed(0, cause)
    assert isinstance(error, WorkerError) and not isinstance(error, (SystemExit, KeyboardInterrupt, StopIteration))
    assert error.__cause__ is cause


def test_an_exception_travels_with_its_traceback():
    def inner():
        raise ValueError("reward is NaN in row 3")

    try:
        inner()
    except ValueError as error:
        found, text, _ = decode_error(encode_error(error))
    assert isinstance(found, ValueError) and found.args == ("reward is NaN in row 3",)
    assert "in inner" in text and text.endswith("ValueError: reward is NaN in row 3\n")


def test_where_shows_the_innermost_frame_first():
    start, end = threading.Event(), threading.Event()

    def wait_here():
        start.set()
        end.wait(10)

    thread = threading.Thread(target=wait_here)
    thread.start()
    start.wait(10)
    place = where(thread.ident)
    end.set()
    thread.join()
    lines = place.splitlines()
    assert "wait_here" in place and lines[0].endswith("wait") and lines[-1].endswith("_bootstrap")
    assert where(thread.ident) == where(None) == "no thread"
