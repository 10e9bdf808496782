"""What ``rl-fn plan`` says against the live bytes of a real step: models × settings × phases, on a CPU.

    python experiments/benchmarks/memory_plan.py --output experiments/results/memory_plan

With --draw the figure alone is drawn again. Every cell is a step that is computed. SmolLM2's shapes need gigabytes
and many minutes: leave them out by --models.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from experiments.benchmarks.memory_grid import models, settings, workload
from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json
from rl_tools.plan.planning import Plan, measure, plan
from rl_tools.plan.steps import PHASES

MIB = 1 << 20


def main() -> None:
    """Measure, and write table.json, table.md and memory_plan.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(models()), choices=list(models()))
    parser.add_argument("--settings", nargs="*", help="names of some settings; all without")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the table that is there")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.output)
        return
    torch.set_num_threads(1)
    rows = []
    for model in arguments.models:
        source = models()[model]
        for name, pipeline in settings(model):
            if arguments.settings and name not in arguments.settings:
                continue
            began = time.monotonic()
            planned = plan(pipeline, source, workload(model))
            middle = time.monotonic()
            measured = measure(pipeline, source, workload(model))
            rows.append(row(model, name, planned, measured, middle - began, time.monotonic() - middle))
            print(line(rows[-1]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    worst = max(abs(cell["planned"] / cell["measured"] - 1) for one in rows for cell in one["phases"].values())
    result = {"worst_relative_error": worst, "rows": rows, "hardware_and_versions": facts()}
    write_json(arguments.output / "table.json", result)
    (arguments.output / "table.md").write_text("\n".join([*HEAD, *map(line, rows)]) + "\n")
    draw(arguments.output)
    print(f"worst relative error {worst:.4%}")


HEAD = (
    "| model | setting | phase of the peak | planned bytes | measured bytes | worst phase |",
    "|---|---|---|---|---|---|",
)


def row(model: str, setting: str, planned: Plan, measured: Plan, plans: float, measures: float) -> dict:
    """A cell of the table: every phase with both numbers, and the components that were measured."""
    phases = {
        name: {
            "planned": planned.phases[name].bytes,
            "measured": peak.bytes,
            "components": {part: size for part, size in peak.components.items() if size},
        }
        for name, peak in measured.phases.items()
    }
    return {
        "model": model,
        "setting": setting,
        "peak_phase": measured.phase,
        "planned": planned.bytes,
        "measured": measured.bytes,
        "phases": phases,
        "seconds": {"plan": round(plans, 2), "measure": round(measures, 2)},
    }


def line(one: dict) -> str:
    """A row of the table in Markdown."""
    worst = max((abs(cell["planned"] / cell["measured"] - 1), name) for name, cell in one["phases"].items())
    return (
        f"| {one['model']} | {one['setting']} | {one['peak_phase']} | {one['planned']} | {one['measured']} "
        f"| {worst[0]:.2%} {worst[1]} |"
    )


def draw(folder: Path) -> None:
    """Plan against measurement, a point for each phase of each cell, as memory_plan.png beside table.json."""
    rows = json.loads((folder / "table.json").read_text("utf-8"))["rows"]
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    most = max(cell["measured"] for one in rows for cell in one["phases"].values()) / MIB
    axes.plot([0, most], [0, most], color="black", linewidth=0.5, label="plan = measurement")
    axes.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], color="gray", alpha=0.2, label="± 5 %")
    for phase, marker in zip(PHASES, "osv^x", strict=True):
        cells = [one["phases"][phase] for one in rows]
        sizes = [[cell[side] / MIB for cell in cells] for side in ("measured", "planned")]
        axes.scatter(*sizes, marker=marker, s=18, alpha=0.7, label=phase)
    axes.set(xlabel="measured peak, MiB", ylabel="planned peak, MiB", title="live bytes of a step's phases")
    axes.legend(fontsize=8)
    with replacing(folder / "memory_plan.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


if __name__ == "__main__":
    main()
