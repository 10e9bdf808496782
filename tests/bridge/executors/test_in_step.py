"""When a failed call leaves its slots in step, which later calls it concerns, and what a call keeps."""

import gc
import weakref

import pytest

from rl_bridge.executors import WorkerDied
from rl_bridge.executors import host as hosts
from rl_bridge.executors.calls import Call, Clock, Step, Steps, concerns, out_of_step
from rl_bridge.executors.executor import OutOfStep, Progress, Together, worker_error
from rl_bridge.executors.host import Host

GLOO = RuntimeError("gloo: connection closed by peer")
HERE = "step.py, line 3"


@pytest.fixture
def clock():
    clock = Clock()
    yield clock
    clock.stop()


def error(slot, cause=None, *, place=HERE, counts=None, completed=False, progress=True):
    """A worker's error, with how far it came."""
    report = Progress(completed, place, counts or {}) if progress else None
    return worker_error(slot, "step", ValueError("x") if cause is None else cause, "traceback", report)


PAIRS = {
    "the same": ({}, {}, True),
    "after as many collectives": ({"counts": {"g": 2}}, {"counts": {"g": 2}}, True),
    "after more collectives": ({"counts": {"g": 2}}, {"counts": {"g": 3}}, False),
    "in groups of their own": ({"counts": {"g": 2, "h": 1}}, {"counts": {"g": 2, "i": 5}}, True),
    "of another class": ({}, {"cause": KeyError("x")}, False),
    "with another text": ({}, {"cause": ValueError("y")}, True),
    "at another place": ({}, {"place": "step.py, line 4"}, False),
    "nobody knows how far": ({"progress": False}, {"progress": False}, False),
    "one does not say how far": ({}, {"progress": False}, False),
    "both returned": ({"completed": True}, {"completed": True, "cause": KeyError("x"), "place": "elsewhere"}, True),
    "one returned": ({"completed": True}, {}, False),
    "of another's end": ({"cause": GLOO}, {"cause": GLOO}, False),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
def test_slots_are_in_step_where_all_came_equally_far(clock, case, turned):
    first, second, alike = PAIRS[case]
    call = Call("step", [0, 1], clock)
    for slot, options in enumerate((second, first) if turned else (first, second)):
        call.fail(slot, error(slot, **options))
    assert call.future.exception() is not None and call.ended_alike(0.0) is alike


@pytest.mark.parametrize(
    ("others", "completed", "alike"),
    [("succeeds", False, False), ("succeeds", True, True), ("dies", False, False), ("is silent", False, False)],
)
def test_an_error_of_one_slot_alone_leaves_the_others_behind_unless_its_function_had_returned(
    clock, others, completed, alike
):
    call = Call("step", [0, 1], clock)
    call.fail(0, error(0, completed=completed))
    if others == "succeeds":
        call.succeed(1, "result")
    elif others == "dies":
        call.fail(1, WorkerDied("slot 1 ended"))
    assert call.ended_alike(0.0) is alike


def test_a_call_that_was_given_up_is_not_in_step(clock):
    call = Call("step", [0], clock)
    call.abandon(TimeoutError("late"))
    call.fail(0, error(0))
    assert isinstance(call.future.exception(), TimeoutError) and not call.ended_alike(0.0)


def test_results_are_in_the_order_of_the_slots_and_none_is_kept_by_a_call_that_failed(clock):
    class Result:
        pass

    call = Call("step", [2, 0, 1], clock)
    for slot in (0, 1, 2):
        call.succeed(slot, f"of {slot}")
    assert list(call.future.result(0).items()) == [(2, "of 2"), (0, "of 0"), (1, "of 1")]
    failed, results = Call("step", [0, 1, 2], clock), [Result(), Result()]
    references = [weakref.ref(result) for result in results]
    failed.succeed(0, results.pop())
    failed.fail(1, error(1))
    failed.succeed(2, results.pop())
    gc.collect()
    assert [one() for one in references] == [None, None]


@pytest.mark.parametrize(
    ("number", "slots", "since", "own", "is_concerned"),
    [
        (5, (0, 1), 4, (0, 1), True),
        (5, (0, 1), 5, (0, 1), False),
        (5, (0, 1), 0, (1, 2), False),
        (5, (0, 1, 2), 0, (1, 2, 3), True),
        (5, (0, 1), 0, (2, 3), False),
        (5, (0,), 0, (0,), False),
    ],
)
def test_a_failure_concerns_engines_that_were_there_and_have_two_of_its_slots(number, slots, since, own, is_concerned):
    """Only two of them have a process group that the call may have been in."""
    assert concerns(Step(number, Together(slots, 0), "step"), Together(own, since)) is is_concerned


def test_failed_calls_are_told_apart_and_those_that_succeeded_are_forgotten(clock):
    steps = Steps()
    before = steps.together([0, 1])
    calls = {name: Call(name, [0, 1], clock) for name in ("good", "alike", "apart", "under way")}
    numbered = {name: steps.begin(before, call) for name, call in calls.items()}
    assert [step.number for step in numbered.values()] == [1, 2, 3, 4]
    for slot in (0, 1):
        calls["good"].succeed(slot, None)
        calls["alike"].fail(slot, error(slot))
        calls["apart"].fail(slot, error(slot, place=f"line {slot}"))
    alike, others = steps.failed(before)
    assert alike == [numbered["alike"]] and others == [(numbered["apart"], calls["apart"])]
    assert steps.failed(steps.together([0, 1])) == ([], []), "an engine that was made afterwards"
    assert steps.failed(Together((1, 2), 0)) == ([], [])
    steps.forget(alike)
    assert steps.failed(before) == ([], others)
    steps.clear()
    assert steps.failed(before) == ([], [])


def test_a_call_that_is_not_sent_has_the_first_cause(clock):
    call = Call("train", [0, 1], clock)
    step = Step(1, Together((0, 1), 0), "train")
    call.fail(0, error(0))
    refused = out_of_step("score", (step, call))
    assert type(refused) is OutOfStep and refused.__cause__ is call.future.exception()
    assert str(refused).startswith("score was not called: train failed before") and "slots [0, 1]" in str(refused)
    dead = Call("train", [0], clock)
    dead.fail(0, WorkerDied("slot 0 ended"))
    refused = out_of_step("score", (step, dead))
    assert type(refused) is WorkerDied and str(refused) == "score: slot 0 ended"


class Group:
    """A process group of nobody, in which so many collectives were joined."""

    joined = 0

    def _get_sequence_number_for_group(self):
        return self.joined


@pytest.fixture
def ended(monkeypatch):
    """Groups that were taken down; those of hosts are made of nothing."""
    found = []
    monkeypatch.setattr(hosts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(hosts.dist, "destroy_process_group", found.append)
    monkeypatch.setattr(hosts, "named_group", lambda *_: Group())
    return found


def test_a_failed_step_has_the_progress_of_engines_groups_among_its_slots_and_these_are_made_anew(ended):
    host = Host(0)
    asked = [((0, 1), ""), ((2, 0), ""), ((0, 1, 2), ""), ((0, 3), ""), ((0, 1), "weights")]
    groups = [host.group(slots, purpose=purpose) for slots, purpose in asked]
    for number, group in enumerate(groups):
        group.joined = number + 1
    for slots, among in [((0, 1), [0]), ((0, 1, 2), [0, 1, 2]), ((1, 0, 3), [0, 3])]:
        step = Step(4, Together(slots, 0), "step")
        progress = host.progress(step, ValueError("x"))
        assert sorted(progress.collectives.values()) == [number + 1 for number in among] and not progress.completed
    host.renew(Step(4, Together((0, 1, 2), 0), "step"))
    assert ended == groups[:3]
    again = [host.group(slots, purpose=purpose) for slots, purpose in asked]
    assert [new is old for new, old in zip(again, groups, strict=True)] == [False, False, False, True, True]


def test_a_call_that_joins_no_collectives_has_no_progress_and_stops_no_step(ended):
    host, step = Host(0), Step(1, Together((0, 1), 0), "step")
    assert host.progress(None, ValueError("x")) is None
    assert host.run(lambda host: "ran", (), step) == "ran"
    assert host.progress(step, ValueError("x")) is not None
    with pytest.raises(OutOfStep, match="ValueError: x"):
        host.run(lambda host: "ran", (), step)
    host.forgive(step)
    assert host.run(lambda host: "ran", (), step) == "ran"
