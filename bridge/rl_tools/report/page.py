"""``rl-fn report``: all that a report shows, put into one file with the page's template, style and scripts."""

import argparse
import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Sequence
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_bridge.common.files import replacing
from rl_bridge.common.terminal import say
from rl_bridge.data.census import SourceCensus
from rl_bridge.run.records import METRICS
from rl_bridge.run.run_toml import RUN_FILE
from rl_tools.report.curves import Group, comparison, curves, differences, grouped, options_of
from rl_tools.report.run_files import FILES, SUMMARY, RunFiles, read_run
from rl_tools.report.sections import (
    completions_of,
    equation_of,
    is_study,
    memory_of,
    slowest_steps,
    study_of,
    warnings_of,
)

# Everything that a report shows, as one object for the page.

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
            {
                "label": group.label,
                "short": ", ".join(runs[place].name for place in group.runs),
                "runs": group.runs,
                "counted": group.counted,
            }
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
        "rows": [SourceCensus(**source).line() for source in run.summary.get("census", {}).values()],
        "versions": run.summary.get("versions", {}),
        "warnings": warnings_of(run),
    }


def _equations(runs: Sequence[RunFiles], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One for groups that optimised the same."""
    equations: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        ended = next((runs[place] for place in group.runs if runs[place].finished), runs[group.runs[0]])
        equation = equation_of(ended.config, ended.summary)
        if equation is None:
            continue
        same = next((other for other in equations if all(other[key] == equation[key] for key in equation)), None)
        if same is None:
            equations.append({**equation, "groups": [number]})
        else:
            same["groups"].append(number)
    return equations


def _samples(run: RunFiles) -> dict[str, list[dict[str, Any]]]:
    """Rows of samples.json with what was said before and after beside each other, greedy and sampled."""
    before, after = run.samples.get("before", {}), run.samples.get("after", {})
    samples: dict[str, list[dict[str, Any]]] = {}
    for how in dict.fromkeys([*before, *after]):
        first, second = before.get(how, []), after.get(how, [])
        pairs = zip_longest(first, second, fillvalue={})
        samples[how] = [
            {
                "prompt": _text((a or b).get("prompt")),
                "answer": None if (a or b).get("answer") is None else _text((a or b).get("answer")),
                "before": _trimmed(a),
                "after": _trimmed(b),
            }
            for a, b in pairs
        ]
    return samples


def _trimmed(sample: dict[str, Any]) -> dict[str, Any] | None:
    if not sample:
        return None
    rewards = {name: value for name, value in sample.items() if name not in ("prompt", "completion", "answer")}
    return {"completion": _text(sample.get("completion")), "rewards": rewards}


def _text(value: Any) -> str:
    """A prompt may be messages, or tokens; an answer is any value of a row."""
    if isinstance(value, list) and all(isinstance(part, dict) and "role" in part for part in value):
        return "\n".join(f"{part['role']}: {_text(part.get('content'))}" for part in value)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# The page: its template, style and scripts put into one file with the content, safe whatever a model wrote.

SCRIPTS = ("dom.js", "scales.js", "plot.js", "curves.js", "tokens.js", "tables.js", "studies.js", "main.js")
"""In the order in which they define what the next ones use."""


def write_report(
    folders: Sequence[Path], output: Path, *, title: str | None = None, reload_seconds: float | None = None
) -> int:
    """Write the report of the runs and tuning studies in ``folders``; returns its bytes.

    A reader sees the old file or the new one.

    Raises:
        ValueError: a folder is no run's and no study's, or a file in it is damaged.
    """
    studies = [study_of(folder) for folder in folders if is_study(folder)]
    runs = [read_run(folder) for folder in folders if not is_study(folder)]
    text = page(content(runs, studies, title=title, reload_seconds=reload_seconds)).encode()
    with replacing(output) as temporary:
        temporary.write_bytes(text)
    return len(text)


def page(shown: dict[str, Any]) -> str:
    """The whole file. Its policy lets no other script run than its own, and nothing be loaded."""
    script = "\n".join(_source(name) for name in SCRIPTS)
    style = _source("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = _source("page.html")
    parts = {
        "{{policy}}": policy,
        "{{title}}": html.escape(printable(shown["title"])),
        "{{style}}": style,
        "{{content}}": encoded(shown),
        "{{script}}": script,
    }
    # One pass: what is put in is not looked at again.
    pieces, rest = [], filled
    for name, value in parts.items():
        before, mark, rest = rest.partition(name)
        assert mark, f"the template has no {name}, or in another order"
        pieces += [before, value]
    return "".join([*pieces, rest])


def encoded(value: Any) -> str:
    """JSON that can stand in a script element: ASCII alone, without a character that HTML reads.

    >>> print(encoded({"a": "</script>&\\u202e"}))
    {"a":"\\u003c/script\\u003e\\u0026\\u202e"}
    """
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def finite(value: Any) -> Any:
    """None in place of every number that JSON does not have.

    >>> finite({"a": [float("nan"), 1.5]})
    {'a': [None, 1.5]}
    """
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """The text without characters that turn or hide what stands around them.

    >>> printable("run\\u202e1\\x00")
    'run�1�'
    """
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _source(name: str) -> str:
    return (resources.files("rl_tools.report") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# ``rl-fn report RUN...``: the page of some runs, once or while they go on.


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(list(words))
    # A run's file stands for the run.
    folders: list[Path] = [path.parent if path.name == RUN_FILE else path for path in arguments.runs]
    output: Path = arguments.output or folders[0] / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output {output}: a report is one HTML file; give a name that ends with .html")
    if arguments.watch is None:
        _write(folders, output, arguments.title, None)
        return 0
    if not 0 < arguments.watch < float("inf"):
        raise ValueError(f"--watch takes seconds above 0, got {arguments.watch:g}")
    return _watch(folders, output, arguments.title, arguments.watch)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="rl-fn report",
        description="One HTML file about runs, without a network: curves, completions, warnings, options.",
    )
    command_line.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or of a tuning study, or a run.toml in it"
    )
    command_line.add_argument("-o", "--output", type=Path, help="the file; report.html in the first folder without")
    command_line.add_argument("--title", help="of the page; the names of the runs without")
    command_line.add_argument(
        "--watch",
        nargs="?",
        const=10.0,
        type=float,
        metavar="SECONDS",
        help="write it anew when a run has gone on, looked at every 10 seconds or so many, until all runs have ended",
    )
    return command_line


def _write(folders: Sequence[Path], output: Path, title: str | None, reload_seconds: float | None) -> None:
    size = write_report(folders, output, title=title, reload_seconds=reload_seconds)
    say(f"{output}: {size / 1e6:.2f} MB", flush=True)


def _watch(folders: Sequence[Path], output: Path, title: str | None, every: float) -> int:
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ValueError(f"{', '.join(missing)} is no folder: begin the run before its report")
    last_content: object = None
    while True:
        # Looked at before they are read: what comes in between is in the next page.
        present = _state(folders)
        ended = all(is_study(folder) or (folder / SUMMARY).is_file() for folder in folders)
        begun = all(is_study(folder) or _has_a_record(folder) for folder in folders)
        if ended or (begun and present != last_content):
            _write(folders, output, title, None if ended else every)
            last_content = present
        if ended:
            return 0
        time.sleep(every)


def _has_a_record(folder: Path) -> bool:
    file = folder / METRICS
    return file.is_file() and b"\n" in file.read_bytes()


def _state(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Size and time of change of every file that a report reads."""
    files = [folder / name for folder in folders for name in FILES]
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
