"""An entropy floor by a Lagrange multiplier, against no bonus and a fixed one.

python experiments/entropy_floor.py --workers 4    # writes experiments/results/entropy_floor/

Without a bonus the entropy falls as the policy learns. The constraint entropy ≥ floor raises its multiplier while the
entropy is under the floor, and lets it shrink while there is slack.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.policy_runs import band, experiment, right, save
from rl_bridge.pipelines.objective_options import ControlOptions, EntropyOptions, objective_options

FLOOR = 0.28
PLAIN = objective_options("dapo")
SETTINGS: dict[str, Any] = {
    "no bonus": ({"objective": PLAIN}, right),
    "fixed bonus 0.01": ({"objective": objective_options("dapo", entropy=EntropyOptions(coef=0.01))}, right),
    "constraint": (
        {"objective": PLAIN, "entropy_control": ControlOptions(kind="constraint", target=FLOOR, lr=0.5, high=2.0)},
        right,
    ),
    "adaptive": (
        {"objective": PLAIN, "entropy_control": ControlOptions(kind="adaptive", target=FLOOR, step=0.02)},
        right,
    ),
}


def draw(runs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """The entropy, the coefficient of the bonus and the held-out accuracy by step."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    entropy, coef, accuracy = figure.subplots(1, 3)
    for i, (name, of) in enumerate(runs.items()):
        band(entropy, of, "entropy", name, f"C{i}", 5)
        band(accuracy, of, "held_out", name, f"C{i}")
        if "entropy_coef" in of[0]["records"][0]:
            band(coef, of, "entropy_coef", name, f"C{i}")
    entropy.axhline(FLOOR, color="black", linestyle="--", linewidth=0.8, label=f"floor {FLOOR:g}")
    for axis, title in ((entropy, "entropy, nats a token"), (coef, "coefficient of the bonus"), (accuracy, "held-out")):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    entropy.legend(fontsize=7)
    save(figure, folder / "entropy.png")


if __name__ == "__main__":
    experiment("entropy_floor", SETTINGS, draw, __doc__)
