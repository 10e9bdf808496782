"""The report of a study: plain data, lines of text, figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.common.files import write_json
from rl_bridge.common.statistics import LEAST, over_seeds
from rl_tools.tune.goals import front, parse_constraint, volume
from rl_tools.tune.importance import importance
from rl_tools.tune.journal import JOURNAL, Event, read_journal

REPORT = "report.json"


def read_study(folder: Path) -> list[Event]:
    """The journal's events; a study that goes on is read as far as it is.

    Raises:
        ValueError: there is no study.
    """
    events, _ = read_journal(folder / JOURNAL)
    if not events or events[0]["kind"] != "study":
        raise ValueError(f"{folder} has no {JOURNAL}: it is not a study's folder")
    return events


def summary_of(events: Sequence[Event]) -> dict[str, Any]:
    """The report as plain data: ``study``, ``trials``, ``best``, ``front``, ``importance``, ``counts``.

    A trial has ``number``, ``assignment``, ``status``, ``reason``, ``values`` (goal → mean, low, high, seeds),
    ``feasible``, ``violations``, ``seconds``, ``on_front``. ``best`` is the best trial by the first goal with its
    interval, ``against_second`` its paired difference to the best trial of another assignment, and ``confirmed`` its
    value with fresh seeds.
    """
    study = {name: value for name, value in events[0].items() if name != "kind"}
    seconds: dict[int, float] = {}
    for event in events:
        if event["kind"] == "ended":
            seconds[event["trial"]] = seconds.get(event["trial"], 0.0) + event.get("seconds", 0.0)
    ends = {event["trial"]: event for event in events if event["kind"] == "told"}
    trials = [_trial(event, ends.get(event["trial"]), seconds) for event in events if event["kind"] == "asked"]
    report = {"study": study, "trials": trials, **_best(study["goals"], trials), **_front(study["goals"], trials)}
    report["importance"] = importance(study["space"], study["goals"], trials)
    statuses = [trial["status"] for trial in trials]
    if report["best"] is not None:
        report["best"] |= _confirmed(report["best"], events)
    return report | {"counts": {status: statuses.count(status) for status in dict.fromkeys(statuses)}}


def _trial(asked: Event, told: Event | None, seconds: Mapping[int, float]) -> dict[str, Any]:
    number = asked["trial"]
    return {
        "number": number,
        "assignment": asked["assignment"],
        "status": "running" if told is None else told["status"],
        "reason": "" if told is None else told["reason"],
        "values": {} if told is None else told.get("values", {}),
        "feasible": told is not None and all(violation <= 0 for violation in told["violations"]),
        "violations": [] if told is None else told["violations"],
        "seconds": round(seconds.get(number, 0.0), 3),
        "on_front": False,
    }


def _usable(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for trial in trials if trial["status"] == "complete" and trial["feasible"]]


def _best(goals: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    goal, sign = goals[0]["name"], -1.0 if goals[0]["maximize"] else 1.0
    ordered = sorted(_usable(trials), key=lambda trial: sign * trial["values"][goal]["mean"])
    if not ordered:
        return {"best": None}
    best = ordered[0]
    entry: dict[str, Any] = {"trial": best["number"], "goal": goal, **best["values"][goal]}
    # A choice is proposed again and again: compared with itself a configuration has no difference.
    second = next((trial for trial in ordered if trial["assignment"] != best["assignment"]), None)
    if second is not None:
        pair = best["values"][goal]["seeds"], second["values"][goal]["seeds"]
        entry["against_second"] = {"trial": second["number"], **over_seeds(*pair)}
    return {"best": entry}


def _confirmed(best: Mapping[str, Any], events: Sequence[Event]) -> dict[str, Any]:
    """The best trial's goal over fresh seeds, by which it was not chosen; ``unconfirmed``: why the others have none."""
    of_best = [event for event in events if event.get("trial") == best["trial"]]
    fresh = {seed for event in of_best if event["kind"] == "confirming" for seed in event["seeds"]}
    ended = [event for event in of_best if event["kind"] == "ended" and event["seed"] in fresh]
    values = [event["values"][best["goal"]] for event in ended if event["status"] == "complete"]
    failed = [event.get("reason", "") for event in ended if event["status"] in ("failed", "pruned", "left out")]
    confirmed = {"confirmed": {**over_seeds(values), "seeds": values}} if values else {}
    return confirmed | ({"unconfirmed": failed} if failed else {})


def _front(goals: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The Pareto front of several goals, and its hypervolume down to the worst value of each."""
    usable = _usable(trials)
    if len(goals) < 2 or not usable:
        return {"front": None}
    up = [goal["maximize"] for goal in goals]
    rows = [[trial["values"][goal["name"]]["mean"] for goal in goals] for trial in usable]
    on = front(rows, up)
    for trial, mark in zip(usable, on, strict=True):
        trial["on_front"] = mark
    worst = [min(column) if high else max(column) for column, high in zip(zip(*rows, strict=True), up, strict=True)]
    numbers = [trial["number"] for trial in usable if trial["on_front"]]
    return {"front": {"trials": numbers, "reference": worst, "hypervolume": volume(rows, worst, up)}}


def lines_of(report: Mapping[str, Any], folder: Path) -> list[str]:
    """The report in words."""
    counts = ", ".join(f"{count} {status}" for status, count in report["counts"].items())
    lines = [f"{len(report['trials'])} trials: {counts or 'none'}"]
    for trial in report["trials"]:
        if trial["status"] == "failed":
            lines.append(f"trial {trial['number']} failed: {trial['reason']}")
    best = report["best"]
    if best is None:
        lines += _without_best(report)
    else:
        seeds = len(best["seeds"])
        lines.append(f"best: trial {best['trial']}, {best['goal']} {_over(best)}")
        chosen = report["trials"][best["trial"]]["assignment"]
        lines += [f"  {name} {value}" for name, value in chosen.items()]
        if seeds > 1 and (second := best.get("against_second")):
            lines.append(f"against the second, trial {second['trial']}, seed by seed: {_over(second, '+')}")
        if confirmed := best.get("confirmed"):
            lines.append(f"with fresh seeds: {best['goal']} {_over(confirmed)}")
        if failed := best.get("unconfirmed"):
            of = len(failed) + len(confirmed["seeds"] if confirmed else ())
            lines.append(f"{len(failed)} of {of} runs with fresh seeds failed and are in no mean: {failed[0]}")
            if not confirmed:
                lines.append(f"trial {best['trial']} is not confirmed: no run with a fresh seed came to its end")
        elif not confirmed and sum(trial["status"] == "complete" for trial in report["trials"]) > 1:
            lines.append("the best of several looks better than it is: --confirm N runs it with N fresh seeds")
    if report["front"]:
        numbers = ", ".join(map(str, report["front"]["trials"]))
        lines.append(f"Pareto front: trials {numbers}; hypervolume {report['front']['hypervolume']:.4g}")
    if report["importance"]["shares"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in report["importance"]["shares"].items())
        lines.append(f"importance: {shares}")
    return [*lines, f"report and figures: {folder / REPORT}"]


def _without_best(report: Mapping[str, Any]) -> list[str]:
    """Why no trial is the best: how many came to their end, and how near they are to each constraint.

    Constraints have units of their own, so that no trial is the nearest to all of them. They stand in the order of how
    many trials keep each.
    """
    complete = [trial for trial in report["trials"] if trial["status"] == "complete"]
    if not complete:
        return ["no trial came to its end"]
    count = "1 trial came to its end, not" if len(complete) == 1 else f"{len(complete)} trials came to their end, none"
    by_count: list[tuple[int, str]] = []
    for place, text in enumerate(report["study"].get("constraints", [])):
        keepers = sum(trial["violations"][place] <= 0 for trial in complete)
        line = f"  {text}: {keepers} {'keeps' if keepers == 1 else 'keep'} it"
        if not keepers:
            nearest = min(complete, key=lambda trial: trial["violations"][place])
            value = nearest["values"][parse_constraint(text).goal.name]["mean"]
            line += f"; the nearest is trial {nearest['number']} with {value:.4g}"
        by_count.append((-keepers, line))
    return [f"{count} within the constraints", *(line for _, line in sorted(by_count, key=lambda pair: pair[0]))]


def _over(values: Mapping[str, Any], sign: str = "") -> str:
    """A mean with its interval and how many seeds they are of."""
    count = values["count"] if "count" in values else len(values["seeds"])
    over = "one seed" if count == 1 else f"{count} seeds"
    mean, low, high = (None if values[end] is None else f"{values[end]:{sign}.4g}" for end in ("mean", "low", "high"))
    return f"{mean}, of {over}: no interval" if low is None or count < LEAST else f"{mean} [{low}, {high}] over {over}"


def write_report(folder: Path) -> list[str]:
    """Write report.json and the figures into a study's folder; returns the report in words."""
    from rl_tools.tune.figures import draw

    report = summary_of(read_study(folder))
    # Through JSON, so that the figures show the written values.
    report = json.loads(json.dumps(report))
    write_json(folder / REPORT, report)
    draw(report, folder)
    return lines_of(report, folder)
