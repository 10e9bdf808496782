"""What the pruners of rl-fn tune save and what they cost: the same trials without one, with paired, with asha.

The sampler is random search, whose proposals do not depend on results. All studies of one seed have the same trials, so
that the study without a pruner says what each stopped trial would have come to. Counted are steps, not seconds.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json
from rl_bridge.run.records import METRICS, read_records
from rl_tools import cli
from rl_tools.tune.study import RUNS
from rl_tools.tune.study_report import read_study, summary_of

KINDS = ("none", "paired", "asha")
OPTIONS = "--prune-after 8 --prune-factor 3 --prune-pairs 4"
"""Of all studies. With 24 steps, asha decides after step 8; paired from step 12 on, with two seeds."""
SPACE = {
    "optimizer.learning-rate": "log:3e-6..3e-3",
    "policy.sampling.n+policy.prompts-per-step": "2+96,4+48,8+24,16+12",
    "objective.clip-high": "log:0.02..1",
}
SEEDS = 3
"""Of a trial."""
GOAL = "held_out"


def run_studies(runs: Path, fixed: Sequence[str], *, studies: int, trials: int, workers: int) -> list[dict[str, Any]]:
    """A study of each kind for each seed of the sampler. One that was stopped goes on; one that has ended is read."""
    found = []
    for seed in range(studies):
        of_kind = {}
        for kind in KINDS:
            folder = runs / f"pruner-{kind}-{seed}"
            print(f"study {folder.name}: {len(found) * len(KINDS) + len(of_kind) + 1} of {studies * len(KINDS)}")
            words = [f"--space.{option}={domain}" for option, domain in SPACE.items()]
            words += f"--sampler random --sampler-seed {seed} --trials {trials} --seeds {SEEDS}".split()
            words += f"--parallel {workers} --maximize {GOAL} --pruner {kind} {OPTIONS}".split()
            words += ["--name", folder.name, "--output", str(runs), *(["--resume"] if folder.exists() else [])]
            if cli.main(["tune", "policy", *words, *fixed]):
                sys.exit(f"the study {folder.name} did not come to its end; the same command goes on")
            of_kind[kind] = summary_of(read_study(folder)), steps_of(folder)
        found.append({"sampler_seed": seed, **judged(of_kind)})
    return found


def steps_of(folder: Path) -> Callable[[int], int]:
    """Trial → steps that its repetitions have made."""

    def steps(trial: int) -> int:
        files = sorted((folder / RUNS).glob(f"trial-{trial:04d}-seed-*/{METRICS}"))
        return sum(len(read_records(file)) for file in files)

    return steps


def judged(of_kind: Mapping[str, tuple[dict[str, Any], Callable[[int], int]]]) -> dict[str, Any]:
    """Trials with what each kind made of them, and of each kind its steps and what its choice loses.

    ``whole`` of a trial is its value without a pruner. ``lost`` is the best of those, less that of the kind's choice.
    """
    trials = of_kind["none"][0]["trials"]
    assert all(trial["status"] == "complete" for trial in trials), "a trial failed without a pruner"
    for found, _ in of_kind.values():
        assert [t["assignment"] for t in found["trials"]] == [t["assignment"] for t in trials], "other trials"
    whole = {trial["number"]: trial["values"][GOAL]["mean"] for trial in trials}
    best = max(whole, key=lambda number: whole[number])
    rows = [
        {
            "trial": trial["number"],
            "assignment": trial["assignment"],
            "whole": whole[trial["number"]],
            **{
                kind: {"status": found["trials"][trial["number"]]["status"], "steps": steps(trial["number"])}
                for kind, (found, steps) in of_kind.items()
            },
        }
        for trial in trials
    ]
    table = {}
    for kind, (found, _) in of_kind.items():
        stopped = [row["whole"] for row in rows if row[kind]["status"] == "pruned"]
        complete = [trial for trial in found["trials"] if trial["status"] == "complete"]
        table[kind] = {
            "steps": sum(row[kind]["steps"] for row in rows),
            "stopped": len(stopped),
            "best_stopped": rows[best][kind]["status"] == "pruned",
            "best_of_stopped": max(stopped, default=None),
            "best_found": found["best"]["mean"],
            "choice": found["best"]["trial"],
            "lost": whole[best] - whole[found["best"]["trial"]],
            "same_values": all(t["values"][GOAL]["mean"] == whole[t["number"]] for t in complete),
        }
    return {"best_trial": best, "best": whole[best], "kinds": table, "trials": rows}


def write(folder: Path, about: Mapping[str, Any], studies: Sequence[Mapping[str, Any]]) -> None:
    """pruning.json and pruning.png."""
    steps = {kind: sum(study["kinds"][kind]["steps"] for study in studies) for kind in KINDS}
    total = {
        kind: {
            "steps": steps[kind],
            "share_of_steps": steps[kind] / steps["none"],
            "stopped": sum(study["kinds"][kind]["stopped"] for study in studies),
            "best_stopped": sum(study["kinds"][kind]["best_stopped"] for study in studies),
            "lost": [study["kinds"][kind]["lost"] for study in studies],
        }
        for kind in KINDS
    }
    write_json(folder / "pruning.json", {"about": about, "total": total, "studies": list(studies), "machine": facts()})
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for number, (axis, kind) in enumerate(zip(figure.subplots(1, 2, sharey=True), KINDS[1:], strict=True)):
        for study in studies:
            points = np.array([(row["whole"], row[kind]["steps"]) for row in study["trials"]])
            seed = study["sampler_seed"]
            axis.plot(*points.T, "ox^sv"[seed % 5], color=f"C{number}", alpha=0.7, label=f"study {seed}")
            axis.axvline(study["best"], color="0.7", linewidth=0.8)
        share = total[kind]["share_of_steps"]
        axis.set(title=f"{kind}: {share:.0%} of the steps", xlabel="held-out accuracy of the whole trial")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.axes[0].set_ylabel("steps made, both seeds")
    with replacing(folder / "pruning.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    for kind, row in total.items():
        lost = ", ".join(f"{value:.4f}" for value in row["lost"])
        print(
            f"{kind}: {row['steps']} steps ({row['share_of_steps']:.0%}), {row['stopped']} trials stopped, "
            f"the best one in {row['best_stopped']} of {len(studies)} studies; the choice loses {lost}"
        )
