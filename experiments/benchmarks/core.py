"""rl_fn's advantages and losses against the other libraries' own functions: python experiments/benchmarks/core.py.

64 × 4096 tokens (make benchmark-core, in the environment of make peers). rl_fn is compiled by jax.jit; the others run
as they ship. The two functions of a pair get the same numbers, must agree, and take turns; a ratio is of medians.
Writes results.json, table.md and plot.png.
"""

import argparse
import datetime
import os
import platform
import statistics
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from tqdm import tqdm

from experiments.benchmarks.core_peers import Call, Data, Pair, groups, losses, recursions
from rl_bridge.common.files import replacing, write_json

RESULTS = Path(__file__).parents[1] / "results" / "core"
PACKAGES = ("rl-fn", "jax", "torch", "trl", "verl", "openrlhf", "google-tunix", "rlax", "torchrl")


def milliseconds(call: Call) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def gap(pair: Pair) -> float:
    """Largest difference of the two results, relative to the largest number; counted positions are compared alike."""
    ours, theirs = np.asarray(pair.ours()), np.asarray(pair.theirs())
    theirs = theirs.reshape(ours.shape)
    # Where ours is zero because a position is masked, some libraries leave numbers that nothing reads.
    where = ours != 0 if pair.kind != "loss" else np.ones(ours.shape, bool)
    size = max(float(np.abs(theirs[where]).max(initial=0.0)), 1e-30)
    return float(np.abs(ours - theirs)[where].max(initial=0.0)) / size


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds of calls that take turns, and their ratio."""
    difference = gap(pair)
    if not difference < 2e-3:
        raise AssertionError(f"{pair.name} and {pair.peer} differ by {difference:.1e} of the largest number")
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(-2, repeats):
        for who in sorted(times, reverse=turn % 2 == 0):
            took = milliseconds(getattr(pair, who))
            if turn >= 0:
                times[who].append(took)
    ours, theirs = (statistics.median(times[who]) for who in ("ours", "theirs"))
    row = {"kind": pair.kind, "name": pair.name, "peer": pair.peer, "ours_ms": ours, "theirs_ms": theirs}
    spread = {f"{who}_quartiles_ms": statistics.quantiles(x, n=4) if len(x) > 1 else x for who, x in times.items()}
    return {**row, "ratio": theirs / ours, "difference": difference, **spread}


def hardware() -> str:
    """The processor, its cores, and what jax and torch use."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    name = lines[0].split(":")[1].strip() if lines else platform.processor()
    return f"{name}, {os.cpu_count()} cores, torch {torch.get_num_threads()} threads, jax on {jax.default_backend()}"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = result["facts"]
    lines = [
        "# rl_fn against the other libraries' own functions\n",
        f"{facts['rows']} × {facts['length']} tokens; {facts['hardware']}; load {facts['load']:.1f} at the start; "
        f"{facts['date']}; {facts['repeats']} turns.",
        ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".",
        "rl_fn under jax.jit, the others as they ship; medians; equal results were a condition.",
        "Above 1, rl_fn is faster.",
    ]
    for kind in ("recursion", "group", "loss"):
        lines += [
            f"\n## {kind}\n",
            "| function | against | rl_fn (ms) | theirs (ms) | ratio |",
            "|---|---|---|---|---|",
        ]
        for row in result["rows"]:
            if row["kind"] == kind:
                times = f"{row['ours_ms']:.2f} | {row['theirs_ms']:.2f} | {row['ratio']:.1f}"
                lines.append(f"| {row['name']} | {row['peer']} | {times} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """A bar a pair, on a logarithmic axis; the line at 1 is equal speed."""
    rows = result["rows"][::-1]
    colours = {"recursion": "tab:blue", "group": "tab:green", "loss": "tab:orange"}
    figure, axes = plt.subplots(figsize=(8, 0.22 * len(rows) + 1.2), layout="constrained")
    axes.barh(
        [f"{row['name']} / {row['peer']}" for row in rows],
        [row["ratio"] for row in rows],
        color=[colours[row["kind"]] for row in rows],
    )
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(y=0.01)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(f"time of the other / time of rl_fn, {result['facts']['rows']} × {result['facts']['length']}")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def main() -> None:
    """Measure every pair and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="a part of the names to measure")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    data, load = Data.random(options.rows, options.length), os.getloadavg()[0]
    pairs = [pair for make in (recursions, groups, losses) for pair in make(data)]
    chosen = [pair for pair in pairs if options.only in f"{pair.kind} {pair.name} {pair.peer}"]
    rows = [measure(pair, options.repeats) for pair in tqdm(chosen)]
    facts = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "load": load,
        "versions": {name: version(name) for name in PACKAGES},
        **{name: getattr(options, name) for name in ("rows", "length", "repeats")},
    }
    result = {"facts": facts, "rows": rows}
    write_json(options.out / "results.json", result)
    with replacing(options.out / "table.md") as temporary:
        temporary.write_text(table(result), encoding="utf-8")
    with replacing(options.out / "plot.png") as temporary:
        plot(result, temporary)
    print(table(result))
    slower = [f"{row['name']} / {row['peer']} {row['ratio']:.2f}" for row in rows if row["ratio"] < 1]
    print(f"slower: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
