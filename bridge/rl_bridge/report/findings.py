"""What a reader should look at: warnings, and the steps that took longest."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.report.reading import RunFiles
from rl_bridge.report.series import short, step_seconds
from rl_bridge.tracking.skips import whose

SLOWEST = 12
NAMED = 8
"""Steps that a warning names at most."""


def warnings_of(run: RunFiles) -> list[str]:
    """Skipped updates, alarms, engines that were replaced, numbers that are not finite, sessions, other options."""
    found = []
    skipped = [record for record in run.records if whose(record)]
    if skipped:
        models = " and ".join(sorted({model for record in skipped for model in whose(record)}))
        found.append(f"updates of {models} skipped in {_steps(skipped)}: a loss or gradient was not finite")
    alarms = [record for record in run.records if record.get("mismatch/alarm")]
    if alarms:
        found.append(f"the rollout samples from another policy than the trainer's in {_steps(alarms)} (mismatch/alarm)")
    for name, what in {
        "weights/engine_replaced": "engines were replaced",
        "errors": "environments failed",
        "aborted": "completions were given up",
    }.items():
        those = [record for record in run.records if record.get(name)]
        if those:
            found.append(f"{what} in {_steps(those)} ({name})")
    broken = [record for record in run.records if any(_is_not_finite(value) for value in record.values())]
    if broken:
        names = sorted({name for record in broken for name, value in record.items() if _is_not_finite(value)})
        found.append(f"{', '.join(names)} not finite in {_steps(broken)}")
    attempts = sorted({record["attempt"] for record in run.records if "attempt" in record})
    if len(attempts) > 1:
        firsts = [next(record for record in run.records if record.get("attempt") == number) for number in attempts[1:]]
        found.append(f"taken up again at {_steps(firsts)}")
    for note in run.notes:
        about = {name: value for name, value in note.items() if name not in ("run", "attempt", "time", "step")}
        told = "; ".join(f"{name}: {_text(value)}" for name, value in about.items())
        found.append(f"after {note.get('step', '?')} records: {told}")
    return found


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
