"""Wall time to a given reward: rollouts in step with training, one step ahead of it, two, and two with partial ones.

python experiments/asynchronous.py    # writes experiments/results/asynchronous/

The given reward is what the synchronous run of the same seed ends with, less 0.02. The task: the quickstart's. Trainer
and rollout are processes of their own with one thread each in every setting, so that the settings differ in nothing but
who waits for whom. All begin with the same warm start of their seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json

RESULTS = Path(__file__).parent / "results"
SETTINGS: dict[str, list[str]] = {
    "synchronous": [],
    "one step ahead": ["--asynchronous.max-staleness", "1"],
    "two steps ahead": ["--asynchronous.max-staleness", "2"],
    "two steps ahead, partial": [
        *("--asynchronous.max-staleness", "2", "--asynchronous.partial", "--asynchronous.no-deterministic"),
        *("--asynchronous.round-tokens", "1"),
    ],
}
WARM = {
    "--sft.steps": 135,
    "--sft.rows-per-step": 256,
    "--optimizer.learning-rate": 2e-3,
    "--optimizer.decay": "constant",
}
PROCESSES = ["--executor", "ray", "--workers", "2", "--threads", "1"]
Made = dict[str, Any]


def command(*words: Any) -> None:
    """Run ``rl-fn``, or fail with what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    called = [sys.executable, "-m", "rl_tools.cli", *map(str, words)]
    done = subprocess.run(called, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(called)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


QUICKSTART = {
    "--policy.sampling.max-new-tokens": 5,
    "--policy.sampling.n": 4,
    "--policy.updates-per-step": 2,
    "--optimizer.learning-rate": 1.5e-4,
    "--optimizer.decay": "linear",
    "--optimizer.final": 0.2,
    "--optimizer.beta2": 0.99,
}
"""Its values, which are not those of a user's larger model."""


def run(setting: str, seed: int, model: Path, arguments: argparse.Namespace, folder: Path) -> Made:
    """The records of one run, made if they are not there."""
    name = f"{setting.replace(' ', '-')}-{seed}"
    if not (folder / name / "summary.json").exists():
        options = {
            "--name": name,
            "--output": folder,
            "--seed": seed,
            "--model": model,
            "--held-out": 300,
            **QUICKSTART,
            "--policy.steps": arguments.steps,
            "--policy.evaluate-every": arguments.evaluate_every,
            "--policy.prompts-per-step": arguments.prompts,
            "--asynchronous.rollout-workers": 1,
            "--checkpoint-every": 1000,
        }
        resume = ["--resume"] if (folder / name).exists() else []
        words = [word for pair in options.items() for word in pair]
        command("train", "policy", *words, *PROCESSES, *SETTINGS[setting], *resume)
    lines = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("stage") == "policy"]
    return {"setting": setting, "seed": seed, "records": records}


def target_of(runs: list[Made], seed: int, below: float) -> float:
    """What the synchronous run of the seed ended with, less ``below``: warm starts differ from seed to seed."""
    (synchronous,) = [run for run in runs if run["seed"] == seed and run["setting"] == "synchronous"]
    return synchronous["records"][-1]["held_out"] - below


def reading(run: Made, target: float) -> Made:
    """When the held-out reward reached the target, and who waited how long."""
    records = run["records"]
    # From the end of the first step, which compiles what all later ones use.
    start, took = records[0]["seconds"], records[-1]["seconds"] - records[0]["seconds"]
    reached = [record for record in records if record.get("held_out", 0.0) >= target]
    found = {
        "target": round(target, 4),
        "seconds_to_target": round(reached[0]["seconds"] - start, 1) if reached else None,
        "steps_to_target": reached[0]["step"] + 1 if reached else None,
        "seconds_a_step": round(took / max(1, len(records) - 1), 3),
        "held_out": records[-1]["held_out"],
        "staleness": statistics.mean(record.get("staleness", 0.0) for record in records),
    }
    for name in ("trainer_idle_seconds", "rollout_idle_seconds"):
        if name in records[0]:
            found[name.replace("_seconds", "_share")] = round(sum(r[name] for r in records[1:]) / took, 3)
    return {"setting": run["setting"], "seed": run["seed"], **found}


def table(readings: list[Made]) -> str:
    """One line a setting, medians over the seeds."""
    head = ["setting", "seconds to target", "steps", "seconds a step", "end", "trainer idle", "rollout idle"]
    lines = [head, ["---"] * len(head)]
    names = ("seconds_to_target", "steps_to_target", "seconds_a_step", "held_out", "trainer_idle_share")
    for setting in SETTINGS:
        of = [found for found in readings if found["setting"] == setting]
        cells = [setting]
        for name in (*names, "rollout_idle_share"):
            values = [found[name] for found in of if found.get(name) is not None]
            missed = f" ({len(of) - len(values)} did not)" if values and len(values) < len(of) else ""
            cells.append(f"{statistics.median(values):.3g}{missed}" if values else "–")
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(runs: list[Made], below: float, file: Path) -> None:
    """Held-out reward against seconds of training, a panel a seed."""
    seeds = sorted({run["seed"] for run in runs})
    figure = Figure(figsize=(5 * len(seeds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(seeds), squeeze=False)[0]
    for run in runs:
        axis = panels[seeds.index(run["seed"])]
        records = [record for record in run["records"] if "held_out" in record]
        start, colour = run["records"][0]["seconds"], f"C{list(SETTINGS).index(run['setting'])}"
        label = run["setting"] if run["seed"] == seeds[0] else None
        seconds, values = [r["seconds"] - start for r in records], [r["held_out"] for r in records]
        axis.plot(seconds, values, color=colour, alpha=0.8, label=label)
    for seed, axis in zip(seeds, panels, strict=True):
        axis.axhline(target_of(runs, seed, below), color="grey", linewidth=0.8)
        axis.set(xlabel="seconds", ylabel="held-out reward", title=f"seed {seed}; trainer and rollout on one core each")
        axis.grid(alpha=0.3)
    panels[0].legend()
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def main() -> None:
    """Make what is missing, one run after another, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=192, help="a step")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--below", type=float, default=0.02, help="the target, from the synchronous run's end")
    parser.add_argument("--warm-start-steps", type=int, default=WARM["--sft.steps"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    runs = Path("runs") / f"asynchronous-{arguments.steps}-steps-{arguments.prompts}-prompts"
    made = []
    for seed in range(arguments.seeds):
        warm = runs / f"warm-{seed}"
        if not (warm / "summary.json").exists():
            options = {**WARM, "--sft.steps": arguments.warm_start_steps, "--seed": seed, "--held-out": 300}
            words = [word for pair in options.items() for word in pair]
            command("train", "sft", "--name", warm.name, "--output", runs, "--threads", 1, *words)
        for setting in SETTINGS:
            made.append(run(setting, seed, warm / "model", arguments, runs))
            print(json.dumps(reading(made[-1], target_of(made, seed, arguments.below))), flush=True)
    folder = arguments.output / "asynchronous"
    folder.mkdir(parents=True, exist_ok=True)
    readings = [reading(run, target_of(made, run["seed"], arguments.below)) for run in made]
    options = vars(arguments) | {"output": ""}
    write_json(folder / "summary.json", {"options": options, "written_on": facts(), "runs": readings})
    (folder / "table.md").write_text(table(readings), "utf-8")
    draw(made, arguments.below, folder / "curves.png")
    print(table(readings), end="")


if __name__ == "__main__":
    main()
