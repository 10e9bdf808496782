"""Writes the table of the invariance law over its whole grid.

python -m tests.bridge.invariance.table [--executors local torchrun ray]
"""

import argparse
import datetime
import tempfile
from importlib.metadata import version
from pathlib import Path

from rl_bridge.common.files import write_json
from tests.bridge.invariance import comparison

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "invariance"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executors", nargs="+", default=["local", "torchrun", "ray"])
    chosen = parser.parse_args().executors
    with tempfile.TemporaryDirectory() as folder:
        found = {executor: comparison.results(executor, Path(folder), "thorough") for executor in chosen}
    rows = []
    for executor, results in found.items():
        for case, result in results.items():
            parts = comparison.differences(case, result, found["local"][comparison.baseline(case)])
            rows.append({"executor": executor, **vars(case), **parts})
    worst = {part: max(row[part] for row in rows) for part in comparison.PARTS}
    gradient = {
        case.trainer: comparison.largest_gradient(result)
        for case, result in found["local"].items()
        if case == comparison.baseline(case)
    }
    summary = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "jax")},
        "cases": len(rows),
        "worst": worst,
        "largest gradient": gradient,
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(RESULTS / "summary.json", summary)
    (RESULTS / "table.md").write_text(markdown(summary), "utf-8")
    print(f"{len(rows)} cases, worst {worst}")


def markdown(summary):
    largest = ", ".join(f"{name} {value:.3f}" for name, value in summary["largest gradient"].items())
    lines = [
        "# One training step, however workers, rows and micro-batches are arranged",
        "",
        "`python -m tests.bridge.invariance.table`: the largest difference from one worker with padded rows in one",
        "micro-batch, in float32. Gradients and, after an update, log-probabilities of tokens (values, rewards) are",
        "absolute differences, numbers relative above 1.",
        f"{summary['date']}, torch {summary['versions']['torch']}, gloo, CPU. Largest gradients: {largest}.",
        "",
        f"| executor | trainer | layout | rows | micro-batches | {' | '.join(comparison.PARTS)} |",
        "|" + "---|" * (5 + len(comparison.PARTS)),
    ]
    for row in summary["rows"]:
        parts = " | ".join(f"{row[part]:.1e}" for part in comparison.PARTS)
        head = f"{row['executor']} | {row['trainer']} | {row['layout']} | {row['rows']} | {row['micro_batches']}"
        lines.append(f"| {head} | {parts} |")
    worst = " | ".join(f"{summary['worst'][part]:.1e}" for part in comparison.PARTS)
    lines.append(f"| **worst** | | | | | {worst} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
