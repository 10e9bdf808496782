"""What a study compares: the goals of its trainers, bounds of both directions, all of a grid, other configurations."""

import inspect
import itertools
import json
import re

import pytest

from rl_tools.tune.goals import parse_constraint, parse_goal
from rl_tools.tune.journal import Key
from rl_tools.tune.samplers import FunctionSampler
from rl_tools.tune.scheduler import Exit, Plan, Scheduler
from rl_tools.tune.study import RunRecords
from rl_tools.tune.study_report import summary_of
from rl_tools.tune.tune_command import DEFAULTS, run
from rl_train import policy, preference, reward_model, sft

KL = [0.02, 0.5, 0.05]


class Ends:
    """Processes that end at once."""

    def __init__(self):
        self.running = []

    def start(self, key, assignment, slot):
        self.running.append(key)

    def ended(self):
        ended, self.running = self.running, []
        return [Exit(key, 0) for key in ended]

    def stop(self, key):
        pass

    def recover(self, key):
        return Exit(key, 0)


def runs(folder, seeds):
    """Folders of runs whose KL falls and rises."""
    for seed in range(seeds):
        place = folder / Key(0, seed).name
        place.mkdir(parents=True)
        records = [
            {"stage": "toy", "step": step, "seconds": 1.0, "kl": kl, "reward": 1.0} for step, kl in enumerate(KL)
        ]
        (place / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (place / "summary.json").write_text('{"seconds": 1.0}')
    return folder


BOUNDS = ["kl:best>=0.6", "kl:best<=0.01", "kl<=0.04", "kl>=0.06", "kl:max<=0.4", "kl:mean>=0.2"]
BROKEN = [0.6 - 0.5, 0.02 - 0.01, 0.05 - 0.04, 0.06 - 0.05, 0.5 - 0.4, 0.2 - 0.19]
"""Bounds, each broken by the number below."""

ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("order", ORDERS, ids=[str(order) for order in ORDERS])
@pytest.mark.parametrize("goal", ["reward", "kl:best"])
def test_bounds_of_one_metric_have_values_of_their_own(order, goal, tmp_path):
    """`kl:best` was one value for the largest and the smallest: the last bound's was compared with both."""
    numbers = [*order, 3, 4, 5]
    constraints = tuple(parse_constraint(BOUNDS[number]) for number in numbers)
    plan = Plan(goals=(parse_goal(goal, maximize=False),), constraints=constraints, trials=1, seeds=2)
    records, events = RunRecords(runs(tmp_path / "runs", 2), plan), []

    def proposes(number, told):
        return {"x": number}

    scheduler = Scheduler(plan, FunctionSampler(proposes), Ends(), records, events.append)
    while not scheduler.step(0.0):
        pass
    wanted = pytest.approx([BROKEN[number] for number in numbers])
    assert events[-1]["kind"] == "told" and events[-1]["violations"] == wanted
    before = [event for event in events if event["kind"] != "told"][:-1]
    again: list = []
    scheduler = Scheduler(plan, FunctionSampler(proposes), Ends(), records, again.append, before)
    scheduler.recover(0.0)
    while not scheduler.step(0.0):
        pass
    assert again[-1]["kind"] == "told" and again[-1]["violations"] == wanted
    study = {"kind": "study", "space": "f", "goals": [{"name": goal, "maximize": False}], "constraints": []}
    (trial,) = summary_of([study, *before, *again])["trials"]
    for number, constraint in zip(numbers, constraints, strict=True):
        mean = trial["values"][constraint.goal.name]["mean"]
        assert constraint.violation(mean) == pytest.approx(BROKEN[number])


def told(number, assignment, value):
    values = {"reward": {"mean": value, "low": None, "high": None, "seeds": [value, value]}}
    end = {"status": "complete", "reason": "", "violations": [], "values": values}
    return [
        {"kind": "asked", "trial": number, "assignment": assignment},
        {"kind": "told", "trial": number, "losses": [-value], **end},
    ]


@pytest.mark.parametrize(
    ("recipes", "second"),
    [("aab", 2), ("aba", 1), ("aabb", 2), ("baa", 0), ("aaa", None), ("a", None)],
)
def test_the_second_has_another_configuration_than_the_best(recipes, second):
    """A choice of two recipes was compared with itself: a difference of 0 with an interval of no width."""
    goals = [{"name": "reward", "maximize": True}]
    events = [{"kind": "study", "space": "f", "goals": goals}]
    for number, recipe in enumerate(recipes):
        events += told(number, {"objective": recipe, "rate": 0.1}, 1.0 if recipe == "a" else 0.5)
    best = summary_of(events)["best"]
    assert best.get("against_second", {}).get("trial") == second
    if second is not None:
        assert best["against_second"]["mean"] == 0.5


@pytest.fixture
def plans(monkeypatch):
    """Plans of the studies that the command would run."""
    made = []
    monkeypatch.setattr("rl_tools.tune.study.run_study", lambda study, resume: made.append(study.plan) or [])
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    monkeypatch.setattr("rl_tools.tune.tune_command._succeeded", lambda events, confirm: True)
    return made


RANGES = ["policy", "--space.policy.steps", "10..30", "--space.policy.prompts-per-step", "8..16"]
RATE = ["--space.optimizer.learning-rate", "log:1e-5..1e-3"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "trials", "remarks"),
    [
        (["--sampler", "grid"], 27, ""),
        (["--sampler", "grid", "--grid-points", "2"], 8, ""),
        (["--sampler", "grid", "--trials", "20"], 20, "20 of 27 combinations"),
        (["--sampler", "grid", "--trials", "27"], 27, ""),
        ([], 20, ""),
        (["--trials", "5"], 5, ""),
    ],
    ids=["grid", "two points", "fewer", "all", "random", "five"],
)
def test_a_grid_is_tried_to_its_end_or_the_study_says_how_far(words, trials, remarks, plans, tmp_path, capsys):
    """It ended after 20 trials of 27 without a word."""
    assert run([*RANGES, *RATE, *words, "--output", str(tmp_path)]) == 0
    assert plans[0].trials == trials
    printed = "".join(capsys.readouterr())
    assert remarks in printed and ("combinations" in printed) is bool(remarks)


RECIPES = {"policy": policy, "sft": sft, "preference": preference, "reward-model": reward_model}


@pytest.mark.parametrize("trainer", RECIPES)
def test_the_goal_of_a_study_that_names_none_is_that_of_the_exported_model(trainer, plans, tmp_path, capsys):
    """Of preferences it was the best accuracy, and the model of the least loss was exported."""
    kept = re.search(r'keep_best\("(\w+)"(?:, "(\w+)")?\)', inspect.getsource(RECIPES[trainer]))
    goal = DEFAULTS[trainer]
    assert kept is not None and (goal.metric, goal.maximize) == (kept[1], kept[2] != "min")
    # A policy's folder ``model`` has the last one.
    assert goal.reduction == ("last" if trainer == "policy" else "best")
    assert run([trainer, *RATE, "--output", str(tmp_path)]) == 0
    assert plans[0].goals == (goal,) and goal.name in capsys.readouterr().out.splitlines()[0]


SEARCHED = [["--space.loss", "dpo,ipo"], ["--space.loss.beta", "0.1..0.5"], ["--space.loss:dpo.beta", "0.1..0.5"]]


@pytest.mark.parametrize("space", SEARCHED, ids=["losses", "a constant", "a constant of one loss"])
def test_values_of_losses_of_unlike_scale_are_not_compared(space, plans, tmp_path, capsys):
    """A smaller beta has another loss, whatever the model."""
    assert run(["preference", *space, "--output", str(tmp_path)]) == 0
    assert [goal.name for goal in plans[0].goals] == ["held_out_accuracy:best"]
    assert "best held_out_loss" in capsys.readouterr().out
