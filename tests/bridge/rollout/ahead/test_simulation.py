"""Thousands of interleavings of training, rollouts, rewards and accidents; a failure is run again from its seed."""

import pytest

from tests.bridge.rollout.ahead.exploring import explore, same_each_time

pytestmark = pytest.mark.long


def test_interleavings():
    """None of them breaks an invariant, and what they contain is enough for that to say something."""
    names = ("several versions", "three versions", "death", "kill", "abort", "at the bound", "passed over", "turns",
             "turns across versions", "began anew", "greedy", "greedy and several versions", "greedy and a kill",
             "greedy began anew", "served and several versions", "ended unseen")  # fmt: skip
    seen = dict.fromkeys(names, 0)
    for world in explore(range(700)):
        samples = [(step, *sample) for step, content in world.history.items() for sample in content]
        seen["several versions"] += any(len(spans) > 1 for *_, spans, _ in samples)
        seen["three versions"] += any(len(spans) > 2 for *_, spans, _ in samples)
        seen["death"] += world.pump.epoch > 0
        seen["kill"] += world.generation > 0
        seen["abort"] += any(reason == "abort" for *_, reason in samples)
        seen["turns"] += world.setting.turns > 1
        seen["turns across versions"] += world.setting.turns > 1 and any(len(spans) > 1 for *_, spans, _ in samples)
        seen["began anew"] += world.began_anew > 0
        greedy = [sample for sample in samples if world.setting.greedy and sample[2] == world.setting.samples]
        seen["greedy"] += len(greedy) > 0
        seen["greedy and several versions"] += any(len(spans) > 1 for *_, spans, _ in greedy)
        seen["greedy and a kill"] += world.setting.greedy and world.generation > 0
        seen["greedy began anew"] += world.setting.greedy and world.began_anew > 0
        seen["served and several versions"] += world.setting.served and any(len(spans) > 1 for *_, spans, _ in samples)
        seen["ended unseen"] += world.ended_unseen > 0
        ages = [step - spans[0][0] for step, *_, spans, _ in samples if spans]
        seen["at the bound"] += max(ages) == world.setting.max_staleness > 0
        seen["passed over"] += [number for _, number, *_ in samples] != sorted(number for _, number, *_ in samples)
    rare = {name: count for name, count in seen.items() if count < 10}
    assert not rare, rare


def test_an_answer_that_comes_when_its_prompt_has_been_trained_on():
    """The conversation began anew and was faster than the answer of its first beginning."""
    explore([2169])


def test_a_deterministic_run_depends_on_no_delay_and_no_kill():
    assert same_each_time(range(300)) > 80


@pytest.mark.slow
def test_many_interleavings():
    explore(range(700, 20_000))
    assert same_each_time(range(300, 6000)) > 1000
