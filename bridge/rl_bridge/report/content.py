"""Everything that a report shows, as one object for the page."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rl_bridge.report.comparing import comparison
from rl_bridge.report.curves import curves
from rl_bridge.report.equation import equation_of
from rl_bridge.report.findings import slowest_steps, warnings_of
from rl_bridge.report.grouping import Group, differences, grouped, options_of
from rl_bridge.report.memory import memory_of
from rl_bridge.report.reading import RunFiles
from rl_bridge.report.tokens import completions_of

HEADLINES = ("result", "accuracy_before", "accuracy_after", "gain", "parameters", "trained_parameters", "held_out")


def content(
    runs: Sequence[RunFiles],
    studies: Sequence[dict[str, Any]] = (),
    *,
    title: str | None = None,
    reload_seconds: float | None = None,
) -> dict[str, Any]:
    """The report of these runs and tuning studies.

    ``reload_seconds``: how often the page looks for a newer one of itself.

    Raises:
        ValueError: there is nothing to report on, or no run has recorded a step.
    """
    if not (runs or studies):
        raise ValueError("a report is of at least one run or study")
    if runs and not any(run.records for run in runs):
        raise ValueError(f"no step is recorded yet in {', '.join(str(run.folder) for run in runs)}")
    groups = grouped(runs)
    stages = curves(runs, groups)
    options = [options_of(run.config) for run in runs]
    return {
        "title": title or ", ".join([*(run.name for run in runs), *(study["name"] for study in studies)]),
        "made": round(time.time(), 3),
        "reload": reload_seconds,
        "runs": [_about(run) for run in runs],
        "groups": [
            {"label": group.label, "short": ", ".join(runs[place].name for place in group.runs), "runs": group.runs}
            for group in groups
        ],
        "stages": stages,
        "comparison": {stage: comparison(stage, runs, groups) for stage in stages},
        "equations": _equations(runs, groups),
        "completions": completions_of(runs),
        "samples": [_samples(run) for run in runs],
        "slowest": [slowest_steps(run) for run in runs],
        "memory": [memory_of(run.memory) for run in runs],
        "options": options,
        "differing": differences(options),
        "studies": list(studies),
    }


def _about(run: RunFiles) -> dict[str, Any]:
    last = run.records[-1] if run.records else {}
    return {
        "name": run.name,
        "seed": run.seed,
        "finished": run.finished,
        "records": len(run.records),
        "stage": last.get("stage"),
        "step": last.get("step"),
        "seconds": last.get("seconds"),
        "time": last.get("time"),
        "tokens": sum(record.get("trained_tokens", 0) for record in run.records),
        "summary": {name: run.summary[name] for name in HEADLINES if name in run.summary},
        "versions": run.summary.get("versions", {}),
        "warnings": warnings_of(run),
    }


def _equations(runs: Sequence[RunFiles], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One for groups that optimised the same."""
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        ended = next((runs[place] for place in group.runs if runs[place].finished), runs[group.runs[0]])
        equation = equation_of(ended.config, ended.summary)
        if equation is None:
            continue
        same = next((other for other in found if all(other[key] == equation[key] for key in equation)), None)
        if same is None:
            found.append({**equation, "groups": [number]})
        else:
            same["groups"].append(number)
    return found


def _samples(run: RunFiles) -> dict[str, list[dict[str, Any]]]:
    """Rows of samples.json with what was said before and after beside each other, greedy and sampled."""
    before, after = run.samples.get("before", {}), run.samples.get("after", {})
    found: dict[str, list[dict[str, Any]]] = {}
    for how in dict.fromkeys([*before, *after]):
        first, second = before.get(how, []), after.get(how, [])
        pairs = zip_longest(first, second, fillvalue={})
        found[how] = [
            {
                "prompt": _text((a or b).get("prompt")),
                "answer": None if (a or b).get("answer") is None else _text((a or b).get("answer")),
                "before": _told(a),
                "after": _told(b),
            }
            for a, b in pairs
        ]
    return found


def _told(sample: dict[str, Any]) -> dict[str, Any] | None:
    if not sample:
        return None
    rewards = {name: value for name, value in sample.items() if name not in ("prompt", "completion", "answer")}
    return {"completion": _text(sample.get("completion")), "rewards": rewards}


def _text(value: Any) -> str:
    """A prompt may be messages."""
    if isinstance(value, list):
        return "\n".join(f"{part.get('role', '')}: {part.get('content', '')}" for part in value)
    return "" if value is None else str(value)
