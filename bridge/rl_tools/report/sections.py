"""Sections of a report: the equation, what to look at, memory, completions over time, a tuning study."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rl_fn
from rl_bridge.run.recorder import whose
from rl_tools.report.run_files import METRICS, POINTS, RunFiles, buckets, short, step_seconds, thinned, thinned_clock
from rl_tools.tune.importance import position
from rl_tools.tune.journal import JOURNAL
from rl_tools.tune.study_report import lines_of, read_study, summary_of

# The equation that a run optimised, as parts that a page sets: text, variables, names, sub- and superscripts.

Part = tuple[str, str]
"""(Kind, text); the kinds are text, var, code, sub, sup."""
_TOKEN = re.compile(
    r"(?P<number>\d[\d.]*(?:e[-+]?\d+)?)|(?P<code>[A-Za-z]+(?:_[A-Za-z]+)+(?=\b))|_\{(?P<low>[^}]*)\}|_(?P<lower>\w+)"
    r"|\^\{(?P<high>[^}]*)\}|\^\((?P<higher>[^)]*)\)|\^(?P<highest>\w)"
    r"|(?P<var>[Α-ΟΡΤ-Ωα-ωℓ]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))|(?P<text>[A-Za-z]+|.)",
    flags=re.DOTALL,
)
_KINDS = {"low": "sub", "lower": "sub", "high": "sup", "higher": "sup", "highest": "sup", "number": "text"}


def parts_of(line: str) -> list[Part]:
    """The parts of one line; what stands beside each other in one kind is one part.

    >>> parts_of("min(ρA, x^2) of old_logprobs")
    [('text', 'min('), ('var', 'ρ'), ('var', 'A'), ('text', ', '), ('var', 'x'), ('sup', '2'), ('text', ') of '),
     ('code', 'old_logprobs')]
    """
    parts: list[Part] = []
    for match in _TOKEN.finditer(line):
        group = match.lastgroup or "text"
        text, kind = match.group(group), _KINDS.get(group, group)
        if kind == "code" and len(text.split("_")[0]) == 1:
            # ε_high: a variable with its subscript.
            head, _, tail = text.partition("_")
            parts += [("var", head), ("sub", tail)]
        elif kind == "text" and parts and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + text)
        else:
            parts.append((kind, text))
    return parts


def equation_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name, a sentence, the docstring's equation, the constants, and where the run has ended what was optimised.

    None for a run whose loss has no name in its config.
    """
    named = [(config.get("objective"), "algorithm", rl_fn.recipes), (config.get("loss"), "loss", rl_fn)]
    for options, key, module in named:
        name = options.get(key) if isinstance(options, Mapping) else None
        function = getattr(module, name, None) if isinstance(name, str) else None
        if isinstance(options, Mapping) and function is not None:
            paragraphs = (inspect.getdoc(function) or "").split("\n\n")
            published = paragraphs[1] if len(paragraphs) > 1 else ""
            optimised = str(summary.get("objective", "")).splitlines()
            return {
                "name": name,
                "about": " ".join(paragraphs[0].split()),
                "published": [parts_of(line) for line in equation_lines(published)],
                "optimised": [parts_of(line.strip()) for line in optimised],
                "constants": {
                    option: str(value)
                    for option, value in options.items()
                    if option != key and value is not None and not isinstance(value, Mapping)
                }
                | {
                    f"{option}.{option_of_part}": str(value)
                    for option, values in options.items()
                    if isinstance(values, Mapping)
                    for option_of_part, value in values.items()
                    if value is not None
                },
            }
    return None


def equation_lines(paragraph: str) -> list[str]:
    """The lines of an equation in a docstring: two spaces behind a comma or semicolon, or a semicolon at an end.

    >>> equation_lines("token-mean of -A log π,  A = (r - mean)/(std +\\nε)")
    ['token-mean of -A log π', 'A = (r - mean)/(std + ε)']
    """
    return [" ".join(part.split()) for part in re.split(r"[;,]\s{2,}|;\n", paragraph) if part.strip()]


# Warnings, and the steps that took longest.

SLOWEST = 12
NAMED = 8
"""Steps that a warning names at most."""


def warnings_of(run: RunFiles) -> list[str]:
    """Skipped updates, alarms, engines that were replaced, numbers that are not finite, sessions, other options."""
    warnings = []
    skipped = [record for record in run.records if whose(record)]
    if skipped:
        models = " and ".join(sorted({model for record in skipped for model in whose(record)}))
        warnings.append(f"updates of {models} skipped in {_steps(skipped)}: a loss or gradient was not finite")
    alarms = [record for record in run.records if record.get("mismatch/alarm")]
    if alarms:
        warnings.append(
            f"the rollout samples from another policy than the trainer's in {_steps(alarms)} (mismatch/alarm)"
        )
    for name, what in {
        "weights/engine_replaced": "engines were replaced",
        "errors": "environments failed",
        "aborted": "completions were given up",
    }.items():
        flagged = [record for record in run.records if record.get(name)]
        if flagged:
            warnings.append(f"{what} in {_steps(flagged)} ({name})")
    broken = [record for record in run.records if any(_is_not_finite(value) for value in record.values())]
    if broken:
        names = sorted({name for record in broken for name, value in record.items() if _is_not_finite(value)})
        warnings.append(f"{', '.join(names)} not finite in {_steps(broken)}")
    attempts = sorted({record["attempt"] for record in run.records if "attempt" in record})
    if len(attempts) > 1:
        firsts = [next(record for record in run.records if record.get("attempt") == number) for number in attempts[1:]]
        warnings.append(f"taken up again at {_steps(firsts)}")
    for note in run.notes:
        about = {name: value for name, value in note.items() if name not in ("run", "attempt", "time", "step")}
        texts = "; ".join(f"{name}: {_text(value)}" for name, value in about.items())
        warnings.append(f"after {note.get('step', '?')} records: {texts}")
    return warnings


def slowest_steps(run: RunFiles) -> dict[str, Any]:
    """The slowest steps with what was recorded of them; ``median`` of each stage's steps, in seconds."""
    rows, medians = [], {}
    for stage in dict.fromkeys(record["stage"] for record in run.records):
        records = [record for record in run.records if record["stage"] == stage]
        timed = [
            (seconds, record)
            for seconds, record in zip(step_seconds(records), records, strict=True)
            if seconds is not None
        ]
        if timed:
            medians[stage] = sorted(seconds for seconds, _ in timed)[len(timed) // 2]
        rows += [
            {
                "stage": stage,
                "step": record["step"],
                "seconds": seconds,
                "tokens": short(record.get("trained_tokens")),
                "evaluated": "held_out" in record,
                "phases": {
                    name.removesuffix("_seconds"): short(value)
                    for name, value in record.items()
                    if name.endswith("_seconds")
                },
            }
            for seconds, record in timed
        ]
    return {"rows": sorted(rows, key=lambda row: -row["seconds"])[:SLOWEST], "medians": medians}


def _steps(records: Sequence[Mapping[str, Any]]) -> str:
    named = [f"{record['stage']} {record['step']}" for record in records[:NAMED]]
    more = f" and {len(records) - NAMED} more" if len(records) > NAMED else ""
    return f"step{'s' if len(records) > 1 else ''} {', '.join(named)}{more}"


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and short(value) is None


def _text(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


# The memory of a run, where it was profiled: from step to step, at the peak by component, within the last step.

MIB = 2**20
Line = Mapping[str, Any]


def memory_of(lines: Sequence[Line]) -> dict[str, Any] | None:
    """``charts`` in MiB, and of each phase the call with the largest peak; None without lines of memory.jsonl."""
    if not lines:
        return None
    ends = {line["step"]: line for line in lines if line.get("end_of_step")}
    largest: dict[int, Line] = {}
    phases: dict[str, Line] = {}
    for line in lines:
        if "peak" in line:
            largest[line["step"]] = max(largest.get(line["step"], line), line, key=lambda one: one["peak"])
            phase = str(line.get("phase"))
            phases[phase] = max(phases.get(phase, line), line, key=lambda one: one["peak"])
    steps = sorted({*ends, *largest})
    sizes = {
        "peak": [largest.get(step, {}).get("peak") for step in steps],
        "after the step": [ends.get(step, {}).get("bytes") for step in steps],
        "process (RSS)": [ends.get(step, {}).get("rss") for step in steps],
    }
    parts = [largest.get(step, {}).get("components", {}) for step in steps]
    last = max(ends, default=max(steps, default=0))
    times, within = _joined([line for line in lines if line["step"] == last and "timeline" in line])
    charts = [
        _chart("memory of a step", "step", steps, sizes),
        _chart("components at the peak of a step", "step", steps, _columns(parts)),
        _chart(f"components within step {last}", "seconds of its calls", times, _columns(within)),
    ]
    peaks = [
        {name: line.get(name) for name in ("phase", "call", "step", "line")} | {"peak": short(line["peak"] / MIB)}
        for line in sorted(phases.values(), key=lambda line: -line["peak"])
    ]
    return {"charts": [chart for chart in charts if chart["columns"]], "peaks": peaks}


def _chart(title: str, unit: str, x: Sequence[float], columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    parts = buckets(len(x), POINTS)
    mib = {name: [None if size is None else short(size / MIB) for size in column] for name, column in columns.items()}
    measured = {name: column for name, column in mib.items() if any(size is not None for size in column)}
    return {
        "title": title,
        "unit": unit,
        "x": [short(value) for value in thinned_clock(x, parts)],
        "columns": {name: thinned(column, parts) for name, column in measured.items()},
    }


def _columns(parts: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [part.get(name, 0) for part in parts] for name in names}


def _joined(calls: Sequence[Line]) -> tuple[list[float], list[Mapping[str, int]]]:
    """The calls' timelines one behind another."""
    times: list[float] = []
    parts: list[Mapping[str, int]] = []
    start = 0.0
    for call in calls:
        for at, components in call["timeline"]:
            times.append(start + at)
            parts.append(components)
        start += call.get("seconds", 0.0)
    return times, parts


# Completions over time for the page: as many steps as it has room for, the first and the last among them.

CHARACTERS = 1_000_000
"""Characters of all completions in a page, about."""


def completions_of(runs: Sequence[RunFiles], room: int = CHARACTERS) -> list[dict[str, Any]]:
    """For each run its steps with samples, thinned evenly until they fit; ``left_out`` is how many steps are not in.

    A step that alone has no room stays as long as it is the last one.
    """
    share = room // max(1, len(runs))
    return [_of_run(run.completions, share) for run in runs]


def _of_run(lines: Sequence[dict[str, Any]], room: int) -> dict[str, Any]:
    sizes = [len(json.dumps(line)) for line in lines]
    places, distance = list(range(len(lines))), 1
    while sum(sizes[place] for place in places) > room and len(places) > 1:
        distance *= 2
        # Counted from the end: the last step is the one that is looked at first.
        places = sorted(range(len(lines) - 1, -1, -distance))
        places = [0, *places] if 0 not in places and len(places) > 1 else places
    return {"steps": [lines[place] for place in places], "left_out": len(lines) - len(places)}


# A tuning study for the page: its trials with their intervals, and where each lies in the search space.


def is_study(folder: Path) -> bool:
    """Whether a folder is a study's and no run's."""
    return (folder / JOURNAL).is_file() and not (folder / METRICS).is_file()


def study_of(folder: Path) -> dict[str, Any]:
    """The content of a study's page, finished or not.

    ``parameters`` have a ``name``, the two ``ends`` of the domain and its ``choices``, if it is one; a trial has
    ``places``, one a parameter from 0 to 1 on the domain's own scale, None where it does not apply.

    Raises:
        ValueError: the journal is damaged; the message names file and line.
    """
    summary = json.loads(json.dumps(summary_of(read_study(folder))))
    space = summary["study"]["space"]
    parameters = [] if isinstance(space, str) else space
    goals = [{"name": goal["name"], "maximize": goal["maximize"]} for goal in summary["study"]["goals"]]
    return {
        "name": folder.resolve().name,
        "goals": goals,
        "parameters": [
            {"name": parameter["name"], "ends": ends_of(parameter["domain"]), "choices": _choices(parameter["domain"])}
            for parameter in parameters
        ],
        "trials": [_trial(trial, parameters, goals) for trial in summary["trials"]],
        "importance": summary["importance"],
        "said": [line for line in lines_of(summary, folder) if not line.startswith("report and figures")],
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
