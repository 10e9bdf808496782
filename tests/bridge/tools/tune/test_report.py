"""The report of a study as data, words and figures."""

import itertools
import json

import numpy as np
import pytest

from rl_tools.tune.goals import Goal, Pruning, front, history, parse_constraint, value_of, volume
from rl_tools.tune.journal import JOURNAL, Journal
from rl_tools.tune.space import Choice, Interval, Parameter, Space
from rl_tools.tune.study_report import lines_of, read_study, summary_of
from rl_tools.tune.tune_command import run

SPACE = Space(
    (
        Parameter("kind", Choice(("a", "b"))),
        Parameter("rate", Interval(1e-4, 1e-2, log=True)),
        Parameter("of_b", Interval(0, 1), ("kind", ("b",))),
    )
)
GOALS = [{"name": "reward", "maximize": True}, {"name": "kl", "maximize": False}]


def study(folder, goals=GOALS, trials=10):
    """Reward grows with the rate, the KL too; trial 3 fails, trial 5 breaks a constraint, the last one runs."""
    folder.mkdir()
    journal = Journal(folder / JOURNAL, len(goals))
    journal.append({"kind": "study", "space": SPACE.described(), "goals": goals})
    for number in range(trials):
        rate = 1e-4 * 100 ** (number / (trials - 1))
        kind = {"kind": "a"} if number % 2 else {"kind": "b", "of_b": 0.5}
        journal.append({"kind": "asked", "trial": number, "assignment": {**kind, "rate": rate}})
        if number == trials - 1:
            break
        for seed in range(3):
            journal.append({"kind": "ended", "trial": number, "seed": seed, "seconds": 2.0})
        told = {"kind": "told", "trial": number, "status": "complete", "reason": "", "violations": [-1.0]}
        for name in ("reward", "kl"):
            seeds = [number + 0.1 * seed for seed in range(3)]
            band = {"mean": seeds[1], "low": seeds[0], "high": seeds[2], "seeds": seeds}
            told.setdefault("values", {})[name] = band
        if number == 3:
            told |= {"status": "failed", "reason": "exit status 1: no room", "values": {}}
        journal.append(told | {"violations": [0.2 if number == 5 else -1.0]})
    return folder


def test_the_best_trial_and_counts(tmp_path):
    found = summary_of(read_study(study(tmp_path / "study", GOALS[:1])))
    assert found["counts"] == {"complete": 8, "failed": 1, "running": 1}
    best = found["best"]
    assert (best["trial"], best["goal"], best["mean"], best["low"], best["high"]) == (8, "reward", 8.1, 8.0, 8.2)
    second = best["against_second"]
    assert second["trial"] == 7 and (second["mean"], second["low"], second["high"]) == pytest.approx((1, 1, 1))
    assert found["front"] is None
    assert found["trials"][0]["seconds"] == 6.0 and not found["trials"][5]["feasible"]
    text = "\n".join(lines_of(found, tmp_path))
    assert (
        "trial 3 failed: exit status 1: no room" in text and "best: trial 8, reward 8.1 [8, 8.2] over 3 seeds" in text
    )


def test_the_best_keeps_the_constraints_and_is_compared_with_the_second_seed_by_seed(tmp_path):
    events = read_study(study(tmp_path / "study", GOALS[:1]))
    told = {event["trial"]: event for event in events if event["kind"] == "told"}
    told[8]["violations"] = [0.1]
    told[7]["values"]["reward"]["seeds"] = [7.0, 7.1, 7.5]
    best = summary_of(events)["best"]
    assert (best["trial"], best["against_second"]["trial"]) == (7, 6)
    second = best["against_second"]
    # Differences 0.9 + {0, 0, 0.3}: mean 1.1, Student's t of two degrees of freedom 4.303.
    half = 4.303 * np.std([1.0, 1.0, 1.3], ddof=1) / 3**0.5
    assert [second[end] for end in ("low", "mean", "high")] == pytest.approx([1.1 - half, 1.1, 1.1 + half], abs=1e-4)


def infeasible(folder, bounds, complete):
    """A study of two trials, of which no complete one keeps all bounds; reward is 0.5 and 1.5, KL 0.3 and 0.2."""
    folder.mkdir(parents=True)
    journal = Journal(folder / JOURNAL, 1)
    journal.append({"kind": "study", "space": SPACE.described(), "goals": GOALS[:1], "constraints": list(bounds)})
    for number in range(2):
        means = {"reward": number + 0.5, "kl": 0.3 - 0.1 * number}
        constraints = [parse_constraint(text) for text in bounds]
        told = {"kind": "told", "trial": number, "status": "complete", "reason": ""}
        told["values"] = {name: {"mean": v, "low": None, "high": None, "seeds": [v]} for name, v in means.items()}
        told["violations"] = [constraint.violation(means[constraint.goal.name]) for constraint in constraints]
        if number >= complete:
            told |= {"status": "failed", "reason": "exit status 1: no room", "values": {}, "violations": []}
        journal.append({"kind": "asked", "trial": number, "assignment": {"kind": "a", "rate": 1e-3}})
        journal.append(told)
    return folder


def test_a_study_without_a_known_best_says_so(tmp_path):
    events = read_study(study(tmp_path / "study"))
    found = summary_of([event | {"violations": [0.1]} if event["kind"] == "told" else event for event in events])
    assert found["best"] is None and found["front"] is None
    assert "8 trials came to their end, none within the constraints" in lines_of(found, tmp_path)


INFEASIBLE = {
    "one": (
        ["kl<=0.1"],
        2,
        ["2 trials came to their end, none", "kl<=0.1: 0 keep it; the nearest is trial 1 with 0.2"],
    ),
    "one trial": (
        ["kl<=0.1"],
        1,
        ["1 trial came to its end, not", "kl<=0.1: 0 keep it; the nearest is trial 0 with 0.3"],
    ),
    "one of two": (
        ["reward>=9", "kl<=0.5"],
        2,
        ["kl<=0.5: 2 keep it\n  reward>=9: 0 keep it; the nearest is trial 1 with 1.5"],
    ),
    "each by another": (["reward>=1", "kl>=0.25"], 2, ["reward>=1: 1 keeps it", "kl>=0.25: 1 keeps it"]),
    "nobody ended": (["kl<=0.1"], 0, ["no trial came to its end\n"]),
}
"""Constraints, how many of two trials are complete, and words of the report."""


@pytest.mark.long
@pytest.mark.parametrize("confirm", [0, 3])
@pytest.mark.parametrize("name", INFEASIBLE)
def test_a_study_without_a_trial_that_can_be_chosen_says_why_and_exits_with_1(
    name, confirm, tmp_path, monkeypatch, capsys
):
    """It was 0 where trials were complete and none kept the constraints, as if there were something to use."""
    bounds, complete, words = INFEASIBLE[name]
    folder = infeasible(tmp_path / "runs" / "tune", bounds, complete)
    monkeypatch.setattr("rl_tools.tune.study.run_study", lambda study, resume: read_study(folder))
    command = ["policy", "--space.policy.steps", "1..3", "--output", str(tmp_path / "runs")]
    command += [word for bound in bounds for word in ("--constraint", bound)] + ["--confirm", str(confirm)]
    assert run(command) == 1
    printed = capsys.readouterr().out
    assert all(part in printed for part in words), printed
    assert ("--confirm 3 ran nothing: there is no best trial" in printed) == (confirm > 0)
    assert json.loads((folder / "report.json").read_text())["best"] is None
    # Read once more, the study says the same.
    assert run(["report", str(folder)]) == 0
    assert words[0] in capsys.readouterr().out


def test_the_best_is_told_with_its_fresh_seeds(tmp_path):
    """TOOL-6: without them the report says what its number is; with them it has another one, of those seeds alone."""
    events = read_study(study(tmp_path / "study", GOALS[:1]))
    told = "\n".join(lines_of(summary_of(events), tmp_path))
    assert "the best of several looks better than it is: --confirm N" in told
    events = [*events, {"kind": "confirming", "trial": 8, "seeds": [3, 4, 5, 6]}]
    for seed, value in ((3, 7.0), (4, 7.1), (5, 7.2), (6, None)):
        status = (
            {"status": "failed", "values": {}} if value is None else {"status": "complete", "values": {"reward": value}}
        )
        events.append({"kind": "ended", "trial": 8, "seed": seed, "seconds": 2.0, **status})
    found = summary_of(events)
    assert found["best"]["confirmed"]["seeds"] == [7.0, 7.1, 7.2]
    told = "\n".join(lines_of(found, tmp_path))
    assert "with fresh seeds: reward 7.1 [6.852, 7.348] over 3 seeds" in told and "--confirm" not in told


@pytest.mark.long
@pytest.mark.parametrize("failed", range(5))
def test_runs_with_fresh_seeds_that_failed_are_told(tmp_path, failed, monkeypatch):
    """A mean of those that came to their end says so; where none did, the command has failed.

    Nobody is advised to do what was done.
    """
    events = read_study(study(tmp_path / "study", GOALS[:1]))
    events = [*events, {"kind": "confirming", "trial": 8, "seeds": [3, 4, 5, 6]}]
    for place, seed in enumerate((3, 4, 5, 6)):
        crash = {"status": "failed", "values": {}, "reason": "exit status 1: no room"}
        end = crash if place < failed else {"status": "complete", "values": {"reward": 7.0}, "reason": ""}
        events.append({"kind": "ended", "trial": 8, "seed": seed, "seconds": 2.0, **end})
    told = "\n".join(lines_of(json.loads(json.dumps(summary_of(events))), tmp_path))
    line = f"{failed} of 4 runs with fresh seeds failed and are in no mean: exit status 1: no room"
    assert (line in told) == (failed > 0) and ("with fresh seeds: reward" in told) == (failed < 4)
    assert ("trial 8 is not confirmed: no run with a fresh seed came to its end" in told) == (failed == 4)
    monkeypatch.setattr("rl_tools.tune.study.run_study", lambda study, resume: events)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    words = ["--space.policy.steps", "1..3", "--confirm", "4", "--output", str(tmp_path)]
    assert run(["policy", *words]) == (1 if failed == 4 else 0)
    assert "--confirm" not in told


def test_the_front_is_that_of_rl_fn(tmp_path):
    found = summary_of(read_study(study(tmp_path / "study")))
    # More reward costs more KL: every trial is on the front but the one that breaks a constraint.
    assert found["front"]["trials"] == [0, 1, 2, 4, 6, 7, 8] and found["front"]["reference"] == [0.1, 8.1]
    assert found["front"]["hypervolume"] == pytest.approx(1 * 7 + 1 * 6 + 2 * 4 + 2 * 2 + 1 * 1)


def test_the_command_writes_data_and_figures(tmp_path, capsys):
    folder = study(tmp_path / "study")
    assert run(["report", str(folder)]) == 0
    assert "Pareto front: trials 0, 1, 2, 4, 6, 7, 8" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text())["best"]["trial"] == 8
    figures = {path.stem for path in folder.glob("*.png")}
    assert figures == {"history", "slices", "parallel_coordinates", "importance", "front"}
    with pytest.raises(ValueError, match=r"has no journal.jsonl: it is not a study's folder"):
        run(["report", str(tmp_path)])


def test_importance_is_of_what_matters(tmp_path):
    found = summary_of(read_study(study(tmp_path / "study", trials=30)))["importance"]
    assert next(iter(found["shares"])) == "rate" and found["shares"]["rate"] > 0.8 and found["reason"] == ""
    few = summary_of(read_study(study(tmp_path / "few", trials=5)))["importance"]
    assert few["shares"] == {} and few["reason"] == "3 complete trials, 8 are needed"


RECORDS = [
    {"stage": "sft", "step": 0, "nll": 3.0, "trained_tokens": 5},
    {"stage": "policy", "step": 0, "reward": 0.5, "held_out": 0.1, "trained_tokens": 10},
    {"stage": "policy", "step": 1, "reward": 0.9, "trained_tokens": 10},
    {"stage": "policy", "step": 2, "reward": 0.7, "held_out": 0.3, "trained_tokens": 10},
]
VALUES = {
    ("reward", "last"): 0.7,
    ("reward", "best"): 0.9,
    ("reward", "min"): 0.5,
    ("reward", "mean"): 0.7,
    ("held_out", "last"): 0.3,
    ("nll", "last"): 3.0,
    ("tokens", "last"): 35.0,
    ("seconds", "last"): 12.5,
    ("gain.low", "last"): 0.05,
}


def test_the_best_of_what_is_minimised_is_the_least():
    assert value_of(Goal("reward", False, "best"), RECORDS, {}) == 0.5


def test_a_metric_of_two_stages_is_that_of_the_last():
    assert history([{"stage": "sft", "step": 7, "nll": 3.0}, {"stage": "dpo", "step": 0, "nll": 2.0}], "nll") == {
        0: 2.0
    }


@pytest.mark.parametrize(("goal", "value"), VALUES.items())
def test_values_of_goals(goal, value):
    summary = {"seconds": 12.5, "gain": {"low": 0.05}}
    assert value_of(Goal(goal[0], True, goal[1]), RECORDS, summary) == pytest.approx(value)


def test_a_goal_without_a_value_is_an_error_that_names_those_there_are():
    with pytest.raises(
        ValueError, match=r"no summary has rewart; did you mean reward\? Records have held_out, nll, reward"
    ):
        value_of(Goal("rewart", True), RECORDS, {})
    with pytest.raises(ValueError, match="reward is nan"):
        value_of(Goal("reward", True), [*RECORDS, {"stage": "policy", "step": 3, "reward": float("nan")}], {})
    assert history(RECORDS, "held_out") == {0: 0.1, 2: 0.3}


def test_constraints():
    low, high = parse_constraint("kl:max<=0.1"), parse_constraint("entropy >= 0.2")
    assert (low.text, high.text) == ("kl:max<=0.1", "entropy>=0.2")
    assert low.violation(0.3) == pytest.approx(0.2) and low.violation(0.1) == 0.0
    assert high.violation(0.3) == pytest.approx(-0.1) and high.violation(0.1) == pytest.approx(0.1)


def test_the_volume_is_that_of_rl_fn():
    rows = [[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [1.0, 1.0]]
    assert volume(rows, [0.0, 0.0], [True, True]) == 6.0 and front([], [True]) == []


def line(start, slope, steps=range(10)):
    return {step: start + slope * step for step in steps}


def verdict(pruning, trial, incumbent, others):
    """Of a trial that has made one step more than it has values."""
    return pruning.verdict(trial, incumbent, others, {seed: max(points) + 2 for seed, points in trial.items()})


def test_paired_pruning_compares_equal_seeds_and_steps():
    pruning = Pruning("paired", least_steps=4, pairs=4)
    best = {seed: line(1.0 + seed, -0.1) for seed in range(3)}

    def shifted(*by, steps=range(8)):
        return {seed: line(1.0 + seed + shift, -0.1, steps) for seed, shift in enumerate(by)}

    worse = shifted(0.2, 0.2, 0.2)
    assert verdict(pruning, worse, best, {}) == "worse than the best trial by 0.2 [0.2, 0.2] over 3 seeds"
    # Seed 1 is worse than the incumbent's seed 0, and equal to its own.
    assert verdict(pruning, shifted(0, 0, 0), best, {}) is None
    assert verdict(pruning, shifted(0.2, 0.2), best, {}) is None, "a seed has not begun"
    assert verdict(pruning, {seed + 3: line(9.0, 0.0) for seed in range(3)}, best, {}) is None, "no seed in common"
    assert verdict(pruning, shifted(9, 9, 9, steps=range(3)), best, {}) is None, "too early"
    assert verdict(pruning, worse, None, {}) is None
    assert verdict(Pruning("paired", least_steps=4, margin=0.25), worse, best, {}) is None
    # Worse on average, but within what the seeds differ by; of more rivals the best one is better by chance.
    assert verdict(pruning, shifted(0.9, -0.1, 0.3), best, {}) is None
    near = shifted(0.18, 0.2, 0.22)
    assert verdict(pruning, near, best, {0: best}) and not verdict(pruning, near, best, dict.fromkeys(range(20), best))
    # A slow start is forgiven: the later half counts.
    slow = {seed: {s: v + (1 if s < 5 else 0) for s, v in points.items()} for seed, points in best.items()}
    assert verdict(Pruning("paired", least_steps=10, pairs=10), slow, best, {}) is None


def test_every_trial_that_could_be_the_best_makes_a_stop_harder():
    pruning, needed = Pruning("paired"), []
    best = {seed: line(1.0, 0.0) for seed in range(3)}
    for rivals in (1, 2, 4, 8):
        others = dict.fromkeys(range(rivals), best)
        trials = ({seed: line(1.0 + 0.01 * (gap + seed), 0.0) for seed in range(3)} for gap in itertools.count())
        needed.append(next(gap for gap, trial in enumerate(trials) if verdict(pruning, trial, best, others)))
    assert needed == sorted(set(needed))


EVALUATIONS, SEEDS_OF_A_TRIAL = 32, 3


def curves_of(draw, trials):
    """[trials, seeds, evaluations]: autocorrelation 0.5 within a run, as much spread between runs as within."""
    noise = draw.normal(size=(trials, SEEDS_OF_A_TRIAL, EVALUATIONS)) * np.sqrt(0.75)
    for place in range(1, EVALUATIONS):
        noise[..., place] += 0.5 * noise[..., place - 1]
    return noise + draw.normal(size=(trials, SEEDS_OF_A_TRIAL, 1))


@pytest.mark.parametrize(("rivals", "worse", "least", "most"), [(1, 0, 0, 0.05), (8, 0, 0, 0.05), (1, 30, 0.8, 1)])
def test_paired_pruning_stops_no_more_equal_trials_than_it_says(rivals, worse, least, most):
    """TOOL-7: at most 5 % over all looks, against one trial and against the best of eight; hopeless ones it stops."""
    draw, pruning, stopped = np.random.default_rng(7), Pruning("paired"), 0
    studies = 300
    for _ in range(studies):
        *earlier, mine = curves_of(draw, rivals + 1)
        points = [[dict(enumerate(run.tolist())) for run in trial] for trial in (*earlier, mine + worse)]
        trials = [dict(enumerate(trial)) for trial in points]
        best = int(np.argmin([trial[..., -8:].mean() for trial in earlier]))
        stopped += verdict(pruning, trials[-1], trials[best], dict(enumerate(trials[:-1]))) is not None
    # Three standard errors of a share of 5 %.
    assert least <= stopped / studies <= most + 3 * (0.05 * 0.95 / studies) ** 0.5


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_one_of_factor_trials_goes_on_rounded_up(factor):
    """SURV-13: of every number of trials that have come to a rung, whether the factor divides it or not."""
    pruning = Pruning("asha", least_steps=2, factor=factor)
    for count in range(1, 12):
        curves = {number: {0: line(float(number), 0.0, range(2))} for number in range(count)}
        others = [{n: curve for n, curve in curves.items() if n != number} for number in range(count)]
        go_on = [verdict(pruning, curves[number], None, others[number]) is None for number in range(count)]
        wanted = count if count < factor else -(-count // factor)
        assert go_on == [True] * wanted + [False] * (count - wanted)


def test_successive_halving():
    pruning = Pruning("asha", least_steps=2, factor=2)
    others = {number: {0: line(float(number), 0.0)} for number in range(3)}
    assert verdict(pruning, {0: line(0.5, 0.0, range(2))}, None, others) is None
    assert (
        verdict(pruning, {0: line(1.5, 0.0, range(2))}, None, others)
        == "2 of 3 trials are better after 2 steps, and 2 go on"
    )
    assert verdict(pruning, {0: line(1.5, 0.0, range(1))}, None, others) is None, "below the first rung"
    assert verdict(pruning, {1: line(1.5, 0.0)}, None, others) is None, "nobody has this seed"
    ended = {0: line(1.5, 0.0, range(2))}
    assert pruning.verdict(ended, None, others, {0: 2}) is None, "a run at its last step is worth no stop"
    # At a rung the others count with what they had there, however good they are by now.
    later = {number: {0: line(2.0, -1.0)} for number in range(3)}
    assert verdict(pruning, {0: line(0.9, 0.0, range(2))}, None, later) is None
    behind = {number: {0: line(0.0, 0.0, range(1))} for number in range(3)}
    assert verdict(pruning, {0: line(1.5, 0.0, range(2))}, None, behind) is None, "the others have not come to the rung"
    third = Pruning("asha", least_steps=2, factor=3)
    assert verdict(third, {0: line(1.5, 0.0, range(2))}, None, {0: others[0]}) is None, (
        "one of three goes on, of two both"
    )
    assert [pruning.rung(steps) for steps in (1, 2, 3, 4, 9)] == [None, 2, 2, 4, 8]
    for wrong in ({"least_steps": 0}, {"pairs": 1}, {"factor": 1}, {"margin": -1.0}):
        with pytest.raises(ValueError, match="need least_steps"):
            Pruning("asha", **wrong)
