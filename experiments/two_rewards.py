"""Two rewards that conflict, and their Pareto front: a right sum, and a small last digit.

python experiments/two_rewards.py --workers 4    # writes experiments/results/two_rewards/

A completion that is right ends in the digit it must; one that pleases the second reward ends in 0. Five weights of the
weighted sum and of Tchebycheff's scalarisation go from one to the other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.policy_runs import experiment, save
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.pipelines.objective_options import objective_options
from rl_fn import pareto_mask

WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)


def both(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Whether the sum is right, and how small its last digit is: 1 for 0, 0 for 9 and for no digit."""
    said = [trajectory.completion.strip() for trajectory in trajectories]
    return {
        "right": [float(text == t.row["answer"]) for text, t in zip(said, trajectories, strict=True)],
        "small": [(9 - int(text[-1])) / 9 if text[-1:].isdigit() else 0.0 for text in said],
    }


def options_of(method: str, weight: float) -> dict[str, Any]:
    """The pipeline's options for a weight of the first reward."""
    weights = (weight, round(1 - weight, 1))
    if method == "sum":
        scalar = ScalarOptions(weights=weights)
    else:
        scalar = ScalarOptions(method="tchebycheff", weights=weights, ideal=(1.0, 1.0))
    return {"objective": objective_options("grpo"), "policy": {"scalar": scalar}}


SETTINGS: dict[str, Any] = {
    f"{method} {weight:g}": (options_of(method, weight), both)
    for method in ("sum", "tchebycheff")
    for weight in WEIGHTS
}


def draw(runs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Where each run ends, and which ends no other beats in both rewards."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    ends: list[list[float]] = []
    for i, method in enumerate(("sum", "tchebycheff")):
        points = [
            [run["records"][-1][f"held_out/{name}"] for name in ("right", "small")]
            for setting, of in runs.items()
            if setting.startswith(method)
            for run in of
        ]
        axis.plot(*np.array(points).T, "o", color=f"C{i}", alpha=0.6, label=method)
        ends += points
    found = np.array(ends, np.float32)
    front = found[np.asarray(pareto_mask(jnp.asarray(found), maximize=True))]
    axis.plot(*front[np.argsort(front[:, 0])].T, color="black", linewidth=1, label="no other is better in both")
    # A policy that gives the right sum where its last digit is below k, and else ends in 0.
    known = [(k / 10, 1 - k * (k - 1) / 180) for k in range(11)]
    axis.plot(*np.array(known).T, "--", color="grey", linewidth=1, label="the best there is, digits equally often")
    axis.set(xlabel="right", ylabel="small last digit", title="held-out rewards at the end of each run")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, folder / "front.png")


if __name__ == "__main__":
    experiment("two_rewards", SETTINGS, draw, __doc__)
