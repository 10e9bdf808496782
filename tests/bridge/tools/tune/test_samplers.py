"""Every sampler, the real one: in the space, the same after a restart, and told of failures."""

import json
import sys

import numpy as np
import pytest

from rl_tools.tune.journal import Journal
from rl_tools.tune.samplers import GONE, SAMPLERS, STARTUP, FunctionSampler, OptunaSampler, Result, load_function
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


def in_space(values, space=SPACE):
    """Each parameter that applies has a value of its domain, and no other has one."""
    assert list(values) == [p.name for p in space if space.applies(p, values)]
    for parameter in space:
        domain, value = parameter.domain, values.get(parameter.name)
        if value is not None and isinstance(domain, Choice):
            assert value in domain.values
        elif value is not None:
            assert domain.low <= value <= domain.high and value == domain.rounded(value)
            assert isinstance(value, int) == domain.whole
    return True


def play(journal, name, trials, seed=7, behind=2):
    """Go on with a study as the tuner does, with ``behind`` trials that run at the same time; returns all trials."""
    sampler = OptunaSampler(name, SPACE, seed, storage=journal.storage)
    asked = [event["assignment"] for event in journal.events if event["kind"] == "asked"]
    for number in range(len(asked), trials):
        asked.append(sampler.ask(number))
        journal.append({"kind": "asked", "assignment": asked[-1]})
        if number >= behind:
            sampler.tell(number - behind, result(number - behind, asked[number - behind]))
            journal.append({"kind": "told"})
    return asked


def test_random_studies_of_neighbouring_seeds_share_no_trial():
    drawn = [
        json.dumps(OptunaSampler("random", SPACE, seed).ask(number), sort_keys=True)
        for seed in range(3)
        for number in range(10)
    ]
    assert len(set(drawn)) == 30


def test_random_trials_are_spread_over_the_space():
    sampler = OptunaSampler("random", SPACE, 0)
    drawn = [sampler.ask(number) for number in range(300)]
    assert all(in_space(row) for row in drawn)
    assert {row["size"] for row in drawn} == set(range(1, 17)) and {row["kind"] for row in drawn} == {"a", "b", "c"}
    below = np.mean([row["rate"] < 1e-3 for row in drawn])
    assert 0.4 < below < 0.6, "half of the draws of a log range lie below its middle in the logarithm"


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_study_goes_on_after_a_restart_as_if_nothing_had_been(name, tmp_path):
    """The models begin after 10 trials at the latest."""
    killed, end = 13, 15
    whole = play(Journal(tmp_path / "whole"), name, end)
    play(Journal(tmp_path / "killed"), name, killed)
    assert play(Journal(tmp_path / "killed"), name, end) == whole and all(in_space(values) for values in whole)
    assert len({json.dumps(values) for values in whole}) > 0.8 * end
    assert play(Journal(tmp_path / "other"), name, 3, seed=8) != whole[:3]
    assert play(Journal(tmp_path / "again"), name, 3) == whole[:3]


def test_failures_stops_and_broken_constraints_are_told_as_such(tmp_path):
    ends = [Result("failed"), Result("pruned", (2.0,)), Result("pruned"), Result("complete", (1.0,), (-0.5, 0.25))]
    for name, last in (("tpe", "COMPLETE"), ("cma-es", "FAIL")):
        journal = Journal(tmp_path / name)
        sampler = OptunaSampler(name, SPACE, 0, storage=journal.storage)
        for number, end in enumerate(ends):
            sampler.ask(number)
            sampler.tell(number, end)
        trials = journal.storage.get_all_trials(0)
        assert [trial.state.name for trial in trials] == ["FAIL", "PRUNED", "PRUNED", last]
        assert trials[1].intermediate_values == {0: 2.0} and trials[3].constraints == {"0": -0.5, "1": 0.25}
        assert trials[3].values == ([1.0] if last == "COMPLETE" else None)


@pytest.mark.parametrize("name", STARTUP)
def test_a_sampler_learns(name):
    """Without failures, the last trials are better than the first ten on average."""
    seeds, trials = (1, 18) if name == "gp" else (2, 36)
    space = Space((Parameter("rate", Interval(1e-5, 1e-1, log=True)), Parameter("share", Interval(-1.0, 1.0))))
    found = []
    for seed in range(seeds):
        sampler, losses = OptunaSampler(name, space, seed), []
        for number in range(trials):
            values = sampler.ask(number)
            losses.append(loss({"kind": "b", **values}))
            sampler.tell(number, Result("complete", (losses[-1],)))
        found.append(np.mean(losses[-6:]) / np.mean(losses[:10]))
    assert np.mean(found) < 0.6


def test_one_goal():
    with pytest.raises(ValueError, match="the sampler cma-es takes one goal, got 2; of several goals learn random"):
        OptunaSampler("cma-es", SPACE, 0, goals=2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_several_goals(name):
    sampler = OptunaSampler(name, SPACE, 0, goals=2)
    for number in range(14):
        values = sampler.ask(number)
        sampler.tell(number, Result("complete", (loss(values), values["share"]), (-1.0,)))
    assert in_space(values)


def test_a_grid_has_every_combination_once():
    sampler = OptunaSampler("grid", SPACE, 0, grid_points=2)
    rows = []
    while (row := sampler.ask(len(rows))) is not None:
        rows.append(row)
    # Two ranges and an integer with two values each for three kinds; of_b with two values for b alone.
    assert len(rows) == 8 * (1 + 1 + 2) == len({json.dumps(row, sort_keys=True) for row in rows})
    assert all(in_space(row) for row in rows)


def test_unknown_samplers_and_missing_libraries_are_named(monkeypatch):
    with pytest.raises(ValueError, match="unknown sampler 'best'; there is random, grid, tpe, gp, cma-es"):
        OptunaSampler("best", SPACE, 0)
    for missing, name in (("optuna", "random"), ("cmaes", "cma-es")):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{missing} is not installed: pip install '\.\[tune\]'"):
            OptunaSampler(name, SPACE, 0)
        monkeypatch.undo()


@pytest.mark.parametrize("name", GONE)
def test_a_sampler_of_another_library_is_refused_with_the_one_of_optuna(name):
    instead = "tpe" if name == "hyperopt" else "gp"
    with pytest.raises(ValueError, match=f"the sampler {name} of .* is gone: give --sampler {instead}, which"):
        OptunaSampler(name, SPACE, 0)


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
    events = []
    sampler = FunctionSampler(load_function(f"{tmp_path / 'mine.py'}:halves"), events, checked.append)
    assert sampler.ask(0) == {"optimizer.learning-rate": 1e-3} == checked[0]
    assert sampler.ask(1) == {"optimizer.learning-rate": 5e-4}
    events += [
        {"kind": "asked", "trial": 0, "assignment": {"optimizer.learning-rate": 1e-3}},
        {"kind": "asked", "trial": 1, "assignment": {"optimizer.learning-rate": 5e-4}},
        {"kind": "told", "trial": 1, "status": "complete", "losses": [0.5], "violations": []},
        {"kind": "told", "trial": 0, "status": "failed", "losses": None, "violations": []},
    ]
    assert sampler.ask(2) == {"optimizer.learning-rate": 5e-4} and sampler.ask(3) is None
    with pytest.raises(
        TypeError, match=r"the function returned 3 for trial 0: a function that proposes takes .* and returns a mapping"
    ):
        FunctionSampler(load_function(f"{tmp_path / 'mine.py'}:wrong")).ask(0)
    for place, message in {"x": "is named module:function", "no_such_module:f": "there is no module"}.items():
        with pytest.raises(ValueError, match=message):
            load_function(place)


def proposals(sampler, sign, trials):
    """One after another; ``sign`` −1 tells the opposite of the loss."""
    found = []
    for number in range(trials):
        found.append(sampler.ask(number))
        sampler.tell(number, Result("complete", (sign * loss(found[-1]),)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", STARTUP)
def test_a_short_study_learns_before_it_ends(name):
    """A library's own number of random trials, up to 20, would make eight trials a random search.

    CMA-ES learns a generation at a time, which here has eight trials.
    """
    trials = 16 if name == "cma-es" else 8
    up, down = (proposals(OptunaSampler(name, SPACE, 0, trials=trials), sign, trials) for sign in (1, -1))
    assert up[0] == down[0]
    assert up != down
    random = [proposals(OptunaSampler(name, SPACE, 0, startup=8), sign, 8) for sign in (1, -1)]
    assert random[0] == random[1]


def test_at_least_one_trial_is_random():
    with pytest.raises(ValueError, match="startup must be at least 1, got 0"):
        OptunaSampler("tpe", SPACE, 0, startup=0)
    assert OptunaSampler("random", SPACE, 0, startup=1) is not None
