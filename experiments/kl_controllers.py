"""KL controllers against a fixed coefficient: which of them holds the policy at a distance from its reference.

python experiments/kl_controllers.py --workers 4    # writes experiments/results/kl_controllers/

The penalty is k3 in the loss. A fixed coefficient holds whatever distance it happens to; a controller is given one.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.policy_runs import band, experiment, right, save
from rl_bridge.pipelines.objective_options import ControlOptions, KLOptions, objective_options

TARGET = 0.02
CONTROLS = {
    "fixed 0.04": ControlOptions(),
    "fixed 1": ControlOptions(),
    # Forty steps of 256 completions change β by the factor that a clipped error allows.
    "linear": ControlOptions(kind="linear", target=TARGET, horizon=512.0),
    "exponential": ControlOptions(kind="exponential", target=TARGET, up=1.2, down=0.9),
    "pid": ControlOptions(kind="pid", target=TARGET, kp=0.5, ki=0.1, high=20.0),
    "constraint": ControlOptions(kind="constraint", target=TARGET, lr=5.0, high=20.0),
}
START = {"fixed 0.04": 0.04, "fixed 1": 1.0}


def options_of(name: str) -> dict[str, Any]:
    """The pipeline's options of a setting."""
    objective = objective_options("grpo", kl=KLOptions(coef=START.get(name, 0.2), estimator="k3"))
    return {"objective": objective, "kl_control": CONTROLS[name]}


SETTINGS: dict[str, Any] = {name: (options_of(name), right) for name in CONTROLS}


def draw(runs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """The KL, the coefficient and the held-out accuracy by step."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    kl, coef, accuracy = figure.subplots(1, 3)
    for i, (name, of) in enumerate(runs.items()):
        band(kl, of, "kl", name, f"C{i}", 5)
        band(accuracy, of, "held_out", name, f"C{i}")
        if name in START:
            coef.axhline(START[name], color=f"C{i}", label=name)
        else:
            band(coef, of, "kl_coef", name, f"C{i}")
    kl.axhline(TARGET, color="black", linestyle="--", linewidth=0.8, label=f"target {TARGET:g}")
    for axis, title in ((kl, "KL to the reference, nats a token"), (coef, "coefficient"), (accuracy, "held-out")):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    coef.set_yscale("symlog", linthresh=0.01)
    kl.legend(fontsize=7)
    save(figure, folder / "controllers.png")


if __name__ == "__main__":
    experiment("kl_controllers", SETTINGS, draw, __doc__)
