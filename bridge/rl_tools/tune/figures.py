"""Figures of a study, from its report: history, slices, parallel coordinates, importance, Pareto front."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_bridge.common.files import replacing
from rl_bridge.common.plots import Figure, colormaps, spared
from rl_tools.tune.importance import position

Report = Mapping[str, Any]
GREY = "0.6"


def draw(report: Report, folder: Path) -> list[Path]:
    """Write ``history.png``, ``slices.png`` … as far as there is something to show; returns the files."""
    files = []
    for name, figure in FIGURES.items():
        file = folder / f"{name}.png"
        with spared(str(file)):
            drawing = figure(report)
            if drawing is not None:
                with replacing(file) as temporary:
                    drawing.savefig(temporary, format="png", dpi=110)
                files.append(file)
    return files


def complete(report: Report) -> list[dict[str, Any]]:
    """Trials with values."""
    return [trial for trial in report["trials"] if trial["status"] == "complete"]


def history(report: Report) -> Figure | None:
    """Each trial with its interval, and the best so far, against the number of the trial."""
    trials, goal = complete(report), report["study"]["goals"][0]
    if not trials:
        return None
    figure, axis = _one_panel()
    feasible = [trial for trial in trials if trial["feasible"]]
    for part, colour, label in (
        (feasible, "C0", "trial, 95 % interval over seeds"),
        ([t for t in trials if not t["feasible"]], GREY, "a constraint is broken"),
    ):
        values = [trial["values"][goal["name"]] for trial in part]
        if values:
            means = np.array([value["mean"] for value in values])
            # Too few seeds have no interval: None becomes NaN, which has no bar.
            ends = np.abs(np.array([[value["low"], value["high"]] for value in values], np.float64).T - means)
            numbers = [trial["number"] for trial in part]
            axis.errorbar(numbers, means, yerr=ends, fmt="o", color=colour, markersize=4, capsize=2, label=label)
    if feasible:
        best = np.maximum if goal["maximize"] else np.minimum
        so_far = best.accumulate([trial["values"][goal["name"]]["mean"] for trial in feasible])
        axis.step([trial["number"] for trial in feasible], so_far, where="post", color="C1", label="best so far")
    stopped = [trial["number"] for trial in report["trials"] if trial["status"] in ("failed", "pruned")]
    if stopped:
        place = axis.get_xaxis_transform()
        axis.plot(stopped, [0.02] * len(stopped), "x", color=GREY, transform=place, label="failed or pruned")
    axis.set(xlabel="trial", ylabel=goal["name"])
    axis.legend(fontsize=7)
    return figure


def slices(report: Report) -> Figure | None:
    """A panel a parameter: the first goal against its value."""
    space, trials, goal = report["study"]["space"], complete(report), report["study"]["goals"][0]["name"]
    if isinstance(space, str) or not trials:
        return None
    columns = min(3, len(space))
    rows = -(-len(space) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, sharey=True)).reshape(-1)
    for axis, parameter in zip(axes, space, strict=False):
        name, domain = parameter["name"], parameter["domain"]
        with_parameter = [trial for trial in trials if name in trial["assignment"]]
        values = [trial["assignment"][name] for trial in with_parameter]
        if domain["kind"] == "Choice":
            axis.set_xticks(range(len(domain["values"])), domain["values"], fontsize=7)
            values = [domain["values"].index(value) for value in values]
        elif domain["log"]:
            axis.set_xscale("log")
        means = [trial["values"][goal]["mean"] for trial in with_parameter]
        axis.scatter(values, means, c=[trial["number"] for trial in with_parameter], cmap="viridis", s=18)
        axis.set_xlabel(name, fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes[len(space) :]:
        axis.set_visible(False)
    axes[0].set_ylabel(goal)
    return figure


def parallel_coordinates(report: Report) -> Figure | None:
    """A line a trial over all parameters; the colour is the first goal."""
    space, trials, goal = report["study"]["space"], complete(report), report["study"]["goals"][0]["name"]
    if isinstance(space, str) or not trials:
        return None
    figure, axis = _one_panel(width=max(6.4, 1.8 * (len(space) + 1)))
    means = np.array([trial["values"][goal]["mean"] for trial in trials])
    span = float(np.ptp(means)) or 1.0
    for trial, mean in sorted(zip(trials, means, strict=True), key=lambda pair: pair[1]):
        share = (mean - means.min()) / span
        heights = [position(parameter, trial["assignment"]) for parameter in space]
        visible = [np.nan if height < 0 else height for height in heights]
        axis.plot(range(len(space) + 1), [*visible, share], color=colormaps["viridis"](share), alpha=0.7, marker=".")
    names = [parameter["name"] for parameter in space]
    axis.set_xticks(range(len(space) + 1), [*names, goal], fontsize=7)
    for column, parameter in enumerate(space):
        low, high = _ends(parameter["domain"])
        axis.annotate(low, (column, 0), fontsize=6, xytext=(2, -9), textcoords="offset points")
        axis.annotate(high, (column, 1), fontsize=6, xytext=(2, 4), textcoords="offset points")
    axis.set(yticks=[], ylim=(-0.08, 1.08))
    return figure


def importance(report: Report) -> Figure | None:
    """Bars of the parameters' shares."""
    shares = report["importance"]["shares"]
    if not shares:
        return None
    figure, axis = _one_panel()
    axis.barh(list(shares)[::-1], list(shares.values())[::-1])
    axis.set(xlabel="share of the importance", xlim=(0, 1))
    return figure


def front(report: Report) -> Figure | None:
    """The first two goals of all trials, with those that no other dominates."""
    goals, trials = report["study"]["goals"], complete(report)
    if len(goals) < 2 or not trials:
        return None
    names = [goal["name"] for goal in goals[:2]]
    figure, axis = _one_panel()
    for part, style in ((False, {"color": GREY, "s": 14}), (True, {"color": "C1", "s": 26})):
        rows = [[trial["values"][name]["mean"] for name in names] for trial in trials if trial["on_front"] is part]
        if rows:
            axis.scatter(*zip(*rows, strict=True), label="on the front" if part else "dominated", **style)
    axis.set(xlabel=names[0], ylabel=names[1])
    axis.legend(fontsize=7)
    return figure


def _one_panel(width: float = 6.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.grid(alpha=0.3)
    return figure, axis


def _ends(domain: Mapping[str, Any]) -> Sequence[str]:
    if domain["kind"] == "Choice":
        return domain["values"][0], domain["values"][-1]
    return f"{domain['low']:g}", f"{domain['high']:g}"


FIGURES: dict[str, Callable[[Report], Figure | None]] = {
    "history": history,
    "slices": slices,
    "parallel_coordinates": parallel_coordinates,
    "importance": importance,
    "front": front,
}
