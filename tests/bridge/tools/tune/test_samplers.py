"""Every sampler of every library, the real one: in the space, replayable, and told of failures."""

import importlib.util
import json

import numpy as np
import pytest

from rl_tools.tune.samplers import (
    SAMPLERS,
    FunctionSampler,
    RandomSampler,
    Result,
    load_function,
    make_sampler,
    penalised,
)
from rl_tools.tune.space import Choice, Interval, Parameter, Space

SPACE = Space(
    (
        Parameter("kind", Choice(("a", "b", "c"))),
        Parameter("rate", Interval(1e-5, 1e-1, log=True)),
        Parameter("share", Interval(-1.0, 1.0)),
        Parameter("size", Interval(1, 16, log=True, whole=True)),
        Parameter("of_b", Interval(0.0, 1.0), ("kind", ("b",))),
    )
)
OWN = ("random", "grid")
tools = pytest.mark.tools
ALL = [pytest.param(name, marks=() if name in OWN else tools) for name in SAMPLERS]
LEARNING = [pytest.param(name, marks=tools) for name in SAMPLERS if name not in OWN]


def loss(values):
    rate = (np.log10(values["rate"]) + 3) ** 2
    return float(rate + (values["share"] - 0.3) ** 2 + {"a": 1.0, "b": 0.0, "c": 0.5}[values["kind"]])


def result(number, values):
    """Each seventh trial fails, each ninth is pruned, each eleventh breaks a constraint."""
    if number % 7 == 3:
        return Result("failed")
    if number % 9 == 4:
        return Result("pruned", (loss(values) + 1,))
    return Result("complete", (loss(values),), (0.5 if number % 11 == 5 else -0.5,))


def play(sampler, calls, trials, behind=2):
    """Ask, with ``behind`` trials that run at the same time; as in a journal, values have been through JSON."""
    asked = {}
    for number in range(trials):
        asked[number] = json.loads(json.dumps(sampler.ask(number)))
        calls.append(("asked", number, asked[number]))
        if number >= behind:
            done = number - behind
            sampler.tell(done, asked[done], result(done, asked[done]))
            calls.append(("told", done, asked[done]))
    return asked


def replayed(sampler, calls):
    for kind, number, values in calls:
        if kind == "asked":
            assert json.loads(json.dumps(sampler.ask(number))) == values, f"trial {number} is another one"
        else:
            sampler.tell(number, values, result(number, values))


def test_random_studies_of_neighbouring_seeds_share_no_trial():
    drawn = [
        json.dumps(RandomSampler(SPACE, seed).ask(number), sort_keys=True) for seed in range(3) for number in range(10)
    ]
    assert len(set(drawn)) == 30


SLOW = ("gp", "skopt", "bayes")
"""Samplers that fit a Gaussian process; the model begins after 10 trials at the latest, and with TPE after 20."""


@pytest.mark.parametrize("name", ALL)
def test_the_same_calls_give_the_same_trials_after_a_restart(name):
    """A study that is killed in its middle goes on as if nothing had been."""
    killed, end = (13, 15) if name in SLOW else (24, 28)
    whole = play(make_sampler(name, SPACE, 7), [], end)
    calls = []
    first = make_sampler(name, SPACE, 7)
    play(first, calls, killed)
    again = make_sampler(name, SPACE, 7)
    replayed(again, calls)
    asked = {number: values for kind, number, values in calls if kind == "asked"}
    for number in range(killed, end):
        asked[number] = json.loads(json.dumps(again.ask(number)))
        again.tell(number - 2, asked[number - 2], result(number - 2, asked[number - 2]))
    assert asked == whole and all(SPACE.require(values) == values for values in asked.values())
    assert len({json.dumps(values) for values in asked.values()}) > 0.8 * end
    assert play(make_sampler(name, SPACE, 8), [], 3) != {number: whole[number] for number in range(3)}


@pytest.mark.parametrize("name", ALL)
def test_a_trial_that_another_sampler_proposed_is_learned_from(name):
    sampler, guide = make_sampler(name, SPACE, 0), make_sampler("random", SPACE, 1)
    for number in range(12):
        sampler.tell(number, guide.ask(number), result(number, guide.ask(number)))
    values = sampler.ask(12)
    assert SPACE.require(values) == values
    sampler.tell(12, {**guide.ask(12)}, result(12, guide.ask(12)))
    assert SPACE.require(sampler.ask(13))


@pytest.mark.parametrize("name", LEARNING)
def test_a_sampler_learns(name):
    """Without failures, the last trials are better than the first ten on average."""
    seeds, trials = (1, 18) if name in ("gp", "skopt") else (2, 36)
    space = Space((Parameter("rate", Interval(1e-5, 1e-1, log=True)), Parameter("share", Interval(-1.0, 1.0))))
    found = []
    for seed in range(seeds):
        sampler, losses = make_sampler(name, space, seed), []
        for number in range(trials):
            values = sampler.ask(number)
            losses.append(loss({"kind": "b", **values}))
            sampler.tell(number, values, Result("complete", (losses[-1],)))
        found.append(np.mean(losses[-6:]) / np.mean(losses[:10]))
    assert np.mean(found) < 0.6


@pytest.mark.parametrize("name", [name for name, (_, needs) in SAMPLERS.items() if needs])
def test_one_goal(name):
    with pytest.raises(ValueError, match=f"the sampler {name} takes one goal, got 2; of several goals learn random"):
        make_sampler(name, SPACE, 0, goals=2)


@pytest.mark.tools
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_several_goals(name):
    sampler = make_sampler(name, SPACE, 0, goals=2)
    for number in range(14):
        values = sampler.ask(number)
        sampler.tell(number, values, Result("complete", (loss(values), values["share"]), (-1.0,)))
    assert SPACE.require(values) == values


def test_a_grid_has_every_combination_once():
    sampler = make_sampler("grid", SPACE, 0, grid_points=2)
    rows = []
    while (row := sampler.ask(len(rows))) is not None:
        rows.append(row)
    # Two ranges and an integer with two values each for three kinds; of_b with two values for b alone.
    assert len(rows) == 8 * (1 + 1 + 2) == len({json.dumps(row, sort_keys=True) for row in rows})
    assert all(SPACE.require(row) == row for row in rows)


def test_unknown_samplers_and_missing_libraries_are_named(monkeypatch):
    with pytest.raises(ValueError, match="unknown sampler 'best'; there is random, grid, tpe"):
        make_sampler("best", SPACE, 0)
    if importlib.util.find_spec("hyperopt") is None:
        with pytest.raises(ModuleNotFoundError, match=r"hyperopt is not installed: pip install '\.\[tune\]'"):
            make_sampler("hyperopt", SPACE, 0)


def test_failures_and_broken_constraints_get_the_worst_loss_that_was_seen():
    good, bad = Result("complete", (1.0,)), Result("complete", (3.0,))
    broken = Result("complete", (0.0,), (0.1,))
    rows = [({"x": i}, r) for i, r in enumerate([Result("failed"), good, broken, bad])]
    assert [loss for _, loss in penalised(rows)] == [3.0, 1.0, 3.0, 3.0]
    assert penalised(rows[:1]) == []


PROPOSAL = """
def halves(number, told):
    if number == 3:
        return None
    best = min((t for t in told if t["losses"]), key=lambda t: t["losses"][0], default=None)
    halved = {"optimizer.learning_rate": 1e-3 / 2**number}
    return halved if best is None else best["assignment"]

def wrong(number, told):
    return 3
"""


def test_a_function_proposes(tmp_path):
    (tmp_path / "mine.py").write_text(PROPOSAL)
    checked = []
    sampler = FunctionSampler(load_function(f"{tmp_path / 'mine.py'}:halves"), checked.append)
    assert sampler.ask(0) == {"optimizer.learning-rate": 1e-3} == checked[0]
    assert sampler.ask(1) == {"optimizer.learning-rate": 5e-4}
    sampler.tell(1, {"optimizer.learning-rate": 5e-4}, Result("complete", (0.5,)))
    sampler.tell(0, {"optimizer.learning-rate": 1e-3}, Result("failed"))
    assert sampler.ask(2) == {"optimizer.learning-rate": 5e-4} and sampler.ask(3) is None
    with pytest.raises(TypeError, match="returns a mapping or None, got int"):
        FunctionSampler(load_function(f"{tmp_path / 'mine.py'}:wrong")).ask(0)
    for place, message in {"x": "is named module:function", "no_such_module:f": "there is no module"}.items():
        with pytest.raises(ValueError, match=message):
            load_function(place)


def proposals(sampler, sign, trials):
    """One after another; ``sign`` −1 tells the opposite of the loss."""
    found = []
    for number in range(trials):
        found.append(sampler.ask(number))
        sampler.tell(number, found[-1], Result("complete", (sign * loss(found[-1]),)))
    return found


@pytest.mark.parametrize("name", LEARNING)
def test_a_short_study_learns_before_it_ends(name):
    """A library's own number of random trials, up to 20, would make eight trials a random search.

    CMA-ES learns a generation at a time, which here has eight trials.
    """
    trials = 16 if name == "cma-es" else 8
    up, down = (proposals(make_sampler(name, SPACE, 0, trials=trials), sign, trials) for sign in (1, -1))
    assert up[0] == down[0]
    assert up != down
    random = [proposals(make_sampler(name, SPACE, 0, startup=8), sign, 8) for sign in (1, -1)]
    assert random[0] == random[1]


def test_at_least_one_trial_is_random():
    with pytest.raises(ValueError, match="startup must be at least 1, got 0"):
        make_sampler("tpe", SPACE, 0, startup=0)
    assert make_sampler("random", SPACE, 0, startup=1) is not None
