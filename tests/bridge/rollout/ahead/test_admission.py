"""The bound of the admission, which its docstring proves: an adversary reaches it and comes no further."""

import math
import random

import pytest

from rl_bridge.rollout.ahead.ledger import Ledger, State, Tokens
from rl_bridge.rollout.ahead.pumps import Admission, TrainingPump


def oldest(admission, steps, ready_first):
    """The greatest staleness of a run whose prompts all go in as early as they may, and become ready as told.

    ``ready_first``: of the numbers that are not ready, which one becomes ready next.
    """
    ledger = Ledger()
    pump, worst = TrainingPump(ledger, admission), 0
    for step in range(steps):
        while ledger.opened < admission.limit(step):
            number = ledger.open(None, [0], step).number
            ledger.submitted((number, 0), 0.0)
        while pump.batch() is None:
            number, _ = ready_first(list(ledger.keys(State.RUNNING)))
            ledger.ended((number, 0), Tokens([1], [0.0], None), ledger.groups[number].admitted, "stop")
            ledger.scored(number, [{}])
        worst = max(worst, *(step - group.admitted for group in pump.take()))
        pump.trained()
    return worst


@pytest.mark.parametrize("prompts", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2, 5, 6])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_the_bound_holds_and_is_reached(prompts, window, extra):
    staleness = math.ceil((window - 1) / prompts) + extra
    admission = Admission(max_staleness=staleness, prompts_per_step=prompts, window=window)

    def late(target):
        """Makes ``target`` wait as long as any other prompt can be taken."""

        def chosen(keys):
            others = [key for key in keys if key[0] != target and key[0] < target + window]
            return others[0] if others else keys[0]

        return chosen

    reached = max(oldest(admission, 12, late(target)) for target in range(6 * prompts))
    # Without a step ahead there is nothing to pass over a prompt for.
    assert reached == (staleness if extra else 0)
    assert oldest(admission, 12, lambda keys: keys[-1]) <= staleness
    for seed in range(5):
        assert oldest(admission, 12, random.Random(seed).choice) <= staleness


def test_a_window_that_the_staleness_has_no_room_for():
    with pytest.raises(ValueError, match="a window of 4 prompts, 3 a step, needs max_staleness ≥ 1, got 0"):
        Admission(max_staleness=0, prompts_per_step=3, window=4)


@pytest.mark.parametrize("wrong", [{"max_staleness": -1}, {"prompts_per_step": 0}, {"window": 0}])
def test_each_count_alone_is_refused(wrong):
    with pytest.raises(ValueError, match="max_staleness ≥ 0"):
        Admission(**{"max_staleness": 1, "prompts_per_step": 3} | wrong)
