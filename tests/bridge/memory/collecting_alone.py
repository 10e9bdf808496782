"""The garbage collector: off within a phase, at work between two, and as the user had it afterwards.

In a process of its own (test_collecting.py): a collection of all that other tests have left takes a second.
"""

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import NLL, AdamW, Model, Policy, Rows, Run
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.engines.worker import Worker
from rl_bridge.loop.data import collate
from rl_bridge.memory.garbage_collection import (
    GENERATIONS,
    PATIENCE,
    collect_all,
    collector_waits,
    one_phase,
    phase_ended,
)
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.run.run import Observer
from rl_train.policy import run_policy
from rl_train.policy_inputs import PolicyInputs
from rl_train.policy_options import PolicyPipeline, WarmStart


class Cycle:
    """Holds itself, and so lives until a collection."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True, scope="module")
def as_a_program_begins() -> Iterator[None]:
    """The tests' own conftest freezes what was imported."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def collector(as_a_program_begins: None) -> Iterator[None]:
    yield
    assert gc.isenabled() and gc.get_freeze_count() == 0


def frozen(one: object) -> bool:
    """The collector does not list what is frozen."""
    return not any(found is one for found in gc.get_objects())


def dropped() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_off_within_a_phase_and_a_collection_between_two():
    with collector_waits():
        assert not gc.isenabled()
        lost = dropped()
        # Far more new objects than the collector's own threshold.
        kept = [[] for _ in range(20 * gc.get_threshold()[0])]
        assert lost() is not None and kept
        phase_ended()
        assert lost() is None and not gc.isenabled()


def test_as_it_was_after_an_exception():
    with pytest.raises(KeyError), collector_waits():
        raise KeyError("no")

    @collector_waits()
    def loop() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            loop()
    with pytest.raises(ValueError, match="no"), one_phase():
        assert not gc.isenabled()
        raise ValueError("no")


def test_a_collector_that_the_user_switched_off_stays_off_and_never_runs():
    gc.disable()
    try:
        with collector_waits(), one_phase():
            lost = dropped()
            phase_ended()
        assert lost() is not None and not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_user_froze_stays_frozen():
    """The count of frozen objects says nothing: what is frozen is freed, too, when nobody holds it any more."""
    mine = Cycle()
    gc.freeze()
    try:
        with collector_waits():
            assert frozen(mine)
            phase_ended()
            later = Cycle()
        assert frozen(mine) and not frozen(later), "what came later is not frozen with it (CORE-14)"
    finally:
        gc.unfreeze()
    assert not frozen(mine)


def test_phases_of_several_threads_overlap():
    steps = [threading.Event() for _ in range(4)]

    def pump() -> None:
        for begun, end in (steps[:2], steps[2:]):
            with one_phase():
                begun.set()
                assert end.wait(20)

    with collector_waits():
        thread = threading.Thread(target=pump)
        thread.start()
        assert steps[0].wait(20)
        lost = dropped()
        phase_ended()
        assert lost() is not None, "the pump is in a phase"
        steps[1].set()
        assert steps[2].wait(20)
        assert lost() is None, "between two phases of the pump"
        lost = dropped()
        for _ in range(PATIENCE):
            phase_ended()
        assert lost() is not None
        phase_ended()
        assert lost() is None, "not later than that"
    assert not gc.isenabled(), "the pump's phase is not over"
    steps[3].set()
    thread.join()


def test_a_loop_begins_with_no_collection_due():
    """However many phases of the loop before it have ended."""
    with collector_waits():
        phase_ended()
    with collector_waits():
        lost = dropped()
        with one_phase():
            pass
        assert lost() is not None, "no phase of this loop has ended"


def test_older_objects_are_looked_at_less_often_and_what_was_there_before_not_at_all():
    before = Cycle()
    lost, runs = weakref.ref(before), []
    gc.callbacks.append(lambda phase, found: runs.append(found["generation"]) if phase == "start" else None)
    try:
        with collector_waits():
            del before
            runs.clear()  # the collection of the beginning
            for _ in range(GENERATIONS**2):
                phase_ended()
            assert lost() is not None, "frozen"
            collect_all()
            assert lost() is None and gc.get_freeze_count()
    finally:
        gc.callbacks.pop()
    whole, last = runs[: GENERATIONS**2], runs[GENERATIONS**2 :]
    assert (whole.count(1), whole.count(2), last) == (GENERATIONS - 1, 1, [2])


class Calls:
    """A worker whose calls leave cycles behind."""

    def __init__(self) -> None:
        self.lost: list[weakref.ref[Cycle]] = []

    def call(self, objects: int) -> bool:
        self.lost.append(dropped())
        self.kept = [[] for _ in range(objects)]
        return gc.isenabled()


def test_what_was_lost_before_the_loop_is_collected_first():
    """Else it would be frozen, and live as long as the loop: a model of gigabytes, for hours."""
    lost = dropped()
    assert lost() is not None
    with collector_waits():
        assert lost() is None


@pytest.mark.parametrize(("thresholds", "collected"), [(2, True), (0, False)])
def test_a_workers_call_is_a_phase(thresholds: int, collected: bool):
    from types import SimpleNamespace

    from rl_bridge.engines.worker import call_worker

    calls, objects = Calls(), thresholds * gc.get_threshold()[0]
    worker = Worker("w", calls, 0, (0,), None, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    host = SimpleNamespace(workers={"w": worker}, slot=0)
    gc.collect(0)
    assert call_worker(host, "w", "call", (objects,), {}, None) is False  # type: ignore[arg-type]
    assert (calls.lost[0]() is None) == collected
    with collector_waits():
        call_worker(host, "w", "call", (2 * gc.get_threshold()[0],), {}, None)  # type: ignore[arg-type]
        assert calls.lost[1]() is not None, "the loop collects"


@pytest.fixture
def model() -> Model:
    tokenizer = character_tokenizer("0123456789+=")
    return Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)


def test_memory_does_not_grow_over_the_steps_of_a_training(model: Model, tmp_path: Path):
    seen: list[weakref.ref[Cycle]] = []
    alive: list[int] = []

    def encoded(rows: Any):
        seen.extend(dropped() for _ in rows)
        return collate([single_turn(row[:2], row[2:]) for row in rows], 0)

    rows = Rows([[2, 3, 4, 5], [6, 7, 8, 1]], collate=encoded, fingerprint="of tokens")
    with Policy(model, NLL(), AdamW(1e-2, total=30)) as policy, Run("run", [policy, rows], output=tmp_path) as run:
        for _ in run.steps(30):
            alive.append(sum(one() is not None for one in seen))
            assert not gc.isenabled()
            metrics = policy.update(rows.batch(2))
            run.log(metrics)
            assert metrics["nll"] > 0
        alive.append(sum(one() is not None for one in seen))
    assert len(seen) == 60 and alive == [0] * 31


def test_every_stage_of_a_recipe_is_in_charge_of_the_collector(model: Model, tmp_path: Path):
    """A warm start and reinforcement learning; each step, and an error that ends the steps."""
    enabled: dict[str, list[bool]] = {}

    class Steps(Observer):
        def recorded(self, record: Mapping[str, Any]) -> None:
            enabled.setdefault(record["stage"], []).append(gc.isenabled())

    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    counts: dict[str, Any] = {"steps": 2, "prompts_per_step": 2}
    config = PolicyConfig(**counts, sampling=SamplingParams(n=2, max_new_tokens=2))
    options = PolicyPipeline(policy=config, sft=WarmStart(steps=2, rows_per_step=2), output=tmp_path)
    run_policy(options, [Steps()], lambda own: PolicyInputs.of(own, model, rows, rows, lambda completion, row: 1.0))
    assert enabled == {"sft": [False] * 2, "policy": [False] * 2} and gc.isenabled()

    state = Rows(rows)
    with pytest.raises(KeyError, match="no"), Run("failed", [state], output=tmp_path) as run:
        for _ in run.steps(2):
            assert not gc.isenabled()
            raise KeyError("no")
    assert gc.isenabled()
