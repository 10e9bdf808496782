"""The table of a whole run: kind, cases, good, poor, bad; the poor and bad ones by name."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.bridge.bad_inputs.case import KINDS

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "bad_inputs"
VERDICTS = ("good", "poor", "bad")


def write_results(lines: Sequence[dict], of: int) -> None:
    """``table.json`` and ``table.md`` of so many cases; what was not run is said."""
    counts = {kind: [sum(x["kind"] == kind and x["verdict"] == v for x in lines) for v in VERDICTS] for kind in KINDS}
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    named = {v: {x["id"]: [x["why"], x["said"][:300]] for x in lines if x["verdict"] == v} for v in VERDICTS[1:]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    table = {kind: dict(zip(VERDICTS, row, strict=True)) for kind, row in counts.items()}
    (RESULTS / "table.json").write_text(
        json.dumps({"cases": of, "run": len(lines), "kinds": table, **named}, indent=1) + "\n"
    )
    text = ["| kind | cases | good | poor | bad |", "|---|---|---|---|---|"]
    text += [f"| {kind} | {sum(row)} | {' | '.join(map(str, row))} |" for kind, row in counts.items() if sum(row)]
    text += ["", f"{len(lines)} of {of} cases were run."]
    for verdict, cases in named.items():
        text += ["", f"{len(cases)} {verdict}:", ""] if cases else []
        text += [f"- {name}: {why}. It says: `{_line(said)}`" for name, (why, said) in cases.items()]
    (RESULTS / "table.md").write_text("\n".join(text) + "\n")


def known() -> set[str]:
    """The cases that the committed table has as poor."""
    return set(json.loads((RESULTS / "table.json").read_text())["poor"])


def _line(said: str) -> str:
    return " ".join(said.replace("`", "'").split())
