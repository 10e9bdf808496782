"""What each way to save memory costs: seconds of an update step, and bytes at its peak, for every ``--activations``.

    python experiments/benchmarks/memory_policies.py --output experiments/results/memory_policies --threads 2

A step is two micro-batches of rows of one length through a policy module, and its update. Bytes are those of live
tensors (rl_tools.profile.live_bytes), in a step that is not timed. Device bytes leave out what a GPU's host would
hold: offloaded activations; with --offload always weights, gradients and optimiser too, as many bytes as four times the
weights. On a CPU both are one memory, and copies between them cost the same memory's time. --draw draws again.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import torch
from matplotlib.figure import Figure

from experiments.benchmarks.memory_grid import models
from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.checkpointing import Activations
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.objective_options import objective_options
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import OFFLOADED, LiveBytes

ROWS = Workload(prompts=2, responses=4, prompt_tokens=32, new_tokens=96)
MIB = 1 << 20
KNOBS = {f"activations {name}": ParallelConfig(activations=name) for name in get_args(Activations)}
KNOBS["offload always"] = ParallelConfig(cpu_offload=True)


class Counted(LiveBytes):
    """Live bytes, and the most that waited in host memory at once: later or earlier than the device's own peak."""

    def reset(self) -> None:
        super().reset()
        self.most_on_host = 0

    def _change(self, component: str, size: int, line: str = "") -> None:
        super()._change(component, size, line)
        if component == OFFLOADED:
            self.most_on_host = max(self.most_on_host, self.components[OFFLOADED])


def main() -> None:
    """Measure, and write table.json, table.md and memory_policies.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["qwen2", "smollm2"], choices=list(models()))
    parser.add_argument(
        "--knobs", nargs="*", default=list(KNOBS), help="some of them, 'activations keep' among them; else all"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each cell, tenfold for tiny models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the table that is there")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.output)
        return
    if unknown := set(arguments.knobs) - set(KNOBS):
        parser.error(f"there is no knob {', '.join(sorted(unknown))}; there are {', '.join(KNOBS)}")
    torch.set_num_threads(arguments.threads)
    rows = []
    for model in arguments.models:
        for knob in arguments.knobs:
            rows.append(
                {"model": model, "knob": knob, **cell(model, knob, arguments.steps * (1 if model == "smollm2" else 10))}
            )
            print(rows[-1], flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows_of = {"rows": ROWS.rows, "tokens_of_a_row": ROWS.row_tokens, "micro_batches": 2}
    measured = {"threads": arguments.threads, "hardware_and_versions": facts()}
    write_json(arguments.output / "table.json", {"step": rows_of, "rows": rows, **measured})
    draw(arguments.output)


def cell(model: str, knob: str, steps: int) -> dict[str, Any]:
    """Bytes of a step, then seconds of ``steps`` others."""
    gc.collect()
    torch.manual_seed(0)
    live = Counted()
    live.reset()
    with live:
        with torch.device("meta"):
            module = PolicyModule(
                models()[model],
                OptimizerConfig(learning_rate=1e-6),
                objective_options("dapo").build(),
                updates=100,
                scoring=ScoringConfig(micro_batch_tokens=ROWS.rows // 2 * ROWS.row_tokens, share_prefixes=False),
                parallel=KNOBS[knob],
            )
        module.load_weights()
        module.on_weights_materialized()
        live.watch(module)
        for _ in range(2):  # the first makes the optimiser's state
            live.reset()
            update(module)
        peak = live.peak()
        live.forget()
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    host = 4 * weights if KNOBS[knob].cpu_offload else live.most_on_host
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        update(module)
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds),
        "seconds_of_steps": seconds,
        "device_bytes": peak.bytes - (host if KNOBS[knob].cpu_offload else 0),
        "host_bytes": host,
        "weights_gradients_optimizer_bytes": 4 * weights,
        "components": {name: size for name, size in peak.components.items() if size},
    }


def update(module: PolicyModule) -> None:
    """A training step with its update."""
    batch = ROWS.batch(300)
    module.train_step(batch, float(batch.mask.sum()))
    module.optimizer_step()


def table(rows: list[dict]) -> str:
    """The table in Markdown; seconds relative to keeping everything, bytes beside weights, gradients and optimiser."""
    first = {one["model"]: one for one in rows if one["knob"] == "activations keep"}
    lines = [
        "| model | knob | seconds of a step | against keep | device, MiB | host, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        ratio = one["seconds"] / first[one["model"]]["seconds"]
        sizes = f"{one['device_bytes'] / MIB:.1f} | {one['host_bytes'] / MIB:.1f}"
        lines.append(f"| {one['model']} | `--{one['knob']}` | {one['seconds']:.3f} | {ratio:.2f} × | {sizes} |")
    return "\n".join(lines) + "\n"


def draw(folder: Path) -> None:
    """table.md, and memory_policies.png: seconds against device bytes, a panel for each model; from table.json."""
    rows = json.loads((folder / "table.json").read_text("utf-8"))["rows"]
    (folder / "table.md").write_text(table(rows), "utf-8")
    names = list(dict.fromkeys(one["model"] for one in rows))
    figure = Figure(figsize=(5.5 * len(names), 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for one in (one for one in rows if one["model"] == name):
            place = one["device_bytes"] / MIB, one["seconds"]
            axes.scatter(*place, s=20)
            label = one["knob"].removeprefix("activations ")
            axes.annotate(label, place, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.axvline(
            next(one["weights_gradients_optimizer_bytes"] for one in rows if one["model"] == name) / MIB,
            color="gray",
            linewidth=0.5,
            label="weights, gradients, optimiser",
        )
        axes.set(title=name, xlabel="device bytes at the peak of an update, MiB", ylabel="seconds of a step")
        axes.margins(x=0.25, y=0.15)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    with replacing(folder / "memory_policies.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


if __name__ == "__main__":
    main()
