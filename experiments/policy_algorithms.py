"""Eight algorithms on one task: GRPO, RLOO, REINFORCE++, Dr. GRPO, DAPO, GSPO, CISPO, and PPO with a critic.

python experiments/policy_algorithms.py --workers 4    # writes experiments/results/policy_algorithms/

Runs that are there already are not made again. All have the same task, warm start, completions and learning rate: the
figure compares objectives and not their tuning.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.policy_runs import band, experiment, right, save
from rl_bridge.pipelines.objective_options import objective_options

ALGORITHMS = {
    "GRPO": objective_options("grpo"),
    "RLOO": objective_options("rloo"),
    "REINFORCE++": objective_options("reinforce_pp"),
    "Dr. GRPO": objective_options("dr_grpo", max_completion_length=4.0),
    "DAPO": objective_options("dapo"),
    "GSPO": objective_options("gspo"),
    "CISPO": objective_options("cispo"),
    "PPO with critic": objective_options("ppo", value_clip=0.2),
}
SETTINGS: dict[str, Any] = {name: ({"objective": objective}, right) for name, objective in ALGORITHMS.items()}


def draw(runs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Held-out accuracy, training reward and entropy by step: mean of the seeds, band from least to most."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axis, (metric, window) in zip(
        figure.subplots(1, 3), {"held_out": 1, "reward": 5, "entropy": 5}.items(), strict=True
    ):
        for i, (name, of) in enumerate(runs.items()):
            band(axis, of, metric, name, f"C{i}", window)
        axis.set(xlabel="step", title=metric.replace("_", "-"))
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    save(figure, folder / "algorithms.png")


if __name__ == "__main__":
    experiment("policy_algorithms", SETTINGS, draw, __doc__)
