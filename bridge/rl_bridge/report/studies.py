"""A tuning study for the page: its trials with their intervals, and where each lies in the search space."""

import json
from pathlib import Path
from typing import Any

from rl_bridge.report.reading import METRICS
from rl_bridge.report.series import short
from rl_bridge.tuning.importance import position
from rl_bridge.tuning.journal import JOURNAL
from rl_bridge.tuning.report import lines_of, read_study, summary_of


def is_study(folder: Path) -> bool:
    """Whether a folder is a study's and no run's."""
    return (folder / JOURNAL).is_file() and not (folder / METRICS).is_file()


def study_of(folder: Path) -> dict[str, Any]:
    """What the page draws of a study, finished or not.

    ``parameters`` have a ``name``, the two ``ends`` of the domain and its ``choices``, if it is one; a trial has
    ``places``, one a parameter from 0 to 1 on the domain's own scale, None where it does not apply.

    Raises:
        ValueError: the journal is damaged; the message names file and line.
    """
    found = json.loads(json.dumps(summary_of(read_study(folder))))
    space = found["study"]["space"]
    parameters = [] if isinstance(space, str) else space
    goals = [{"name": goal["name"], "maximize": goal["maximize"]} for goal in found["study"]["goals"]]
    return {
        "name": folder.resolve().name,
        "goals": goals,
        "parameters": [
            {"name": parameter["name"], "ends": ends_of(parameter["domain"]), "choices": _choices(parameter["domain"])}
            for parameter in parameters
        ],
        "trials": [_trial(trial, parameters, goals) for trial in found["trials"]],
        "importance": found["importance"],
        "said": [line for line in lines_of(found, folder) if not line.startswith("report and figures")],
    }


def ends_of(domain: dict[str, Any]) -> list[str]:
    """First and last value of a domain, as text."""
    values = domain["values"] if domain["kind"] == "Choice" else [domain["low"], domain["high"]]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in (values[0], values[-1])]


def _choices(domain: dict[str, Any]) -> list[str]:
    return [str(value) for value in domain["values"]] if domain["kind"] == "Choice" else []


def _trial(trial: dict[str, Any], parameters: list[dict[str, Any]], goals: list[dict[str, Any]]) -> dict[str, Any]:
    places = [position(parameter, trial["assignment"]) for parameter in parameters]
    return {
        "number": trial["number"],
        "status": trial["status"],
        "reason": trial["reason"],
        "feasible": trial["feasible"],
        "on_front": trial["on_front"],
        "seconds": short(trial["seconds"]),
        "assignment": {name: str(value) for name, value in trial["assignment"].items()},
        "places": [None if place < 0 else short(place) for place in places],
        "values": {
            goal["name"]: {end: short(value[end]) for end in ("mean", "low", "high")}
            for goal in goals
            if (value := trial["values"].get(goal["name"]))
        },
    }
