"""Learning curves of a run as one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_bridge.atomic import replacing
from rl_bridge.plots import Figure
from rl_bridge.tracking.smoothing import running_mean

PANELS = (
    "reward",
    "held_out",
    "kl",
    "approx_kl",
    "entropy",
    "clip_fraction",
    "nll",
    "loss",
    "accuracy",
    "grad_norm",
    "tokens_per_second",
)


def draw_curves(
    records: Sequence[Mapping[str, Any]], path: Path, *, title: str, levels: Mapping[str, float] | None = None
) -> None:
    """A panel a metric that occurs in ``records``, a colour a stage, against the record's time in seconds.

    ``levels`` are dashed lines: the value of a metric before the stage that the run is about.
    """
    panels = [name for name in PANELS if any(name in record for record in records)]
    if not panels:
        raise ValueError("there is nothing to draw: no step was logged")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).reshape(-1)
    stages = list(dict.fromkeys(record["stage"] for record in records))
    for axis, name in zip(axes, panels, strict=False):
        for number, stage in enumerate(stages):
            points = [(r["seconds"], r[name]) for r in records if r["stage"] == stage and name in r]
            if points:
                _curve(axis, np.array(points), f"C{number}", stage)
        if levels and name in levels:
            axis.axhline(levels[name], color="grey", linewidth=0.8, linestyle="--", label=f"before: {levels[name]:.3f}")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_xlabel("seconds", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _curve(axis: Any, points: np.ndarray, colour: str, label: str) -> None:
    """The raw points faintly, their running mean boldly, as the report has them."""
    smooth = running_mean(points[:, 1].tolist())
    if smooth is not None:
        axis.plot(points[:, 0], points[:, 1], color=colour, alpha=0.25, linewidth=0.8)
        axis.plot(points[:, 0], smooth, color=colour, label=label)
    else:
        axis.plot(points[:, 0], points[:, 1], color=colour, marker="o", markersize=3, label=label)
