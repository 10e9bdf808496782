"""What trackers cost a run: seconds of a step and of the whole run with each, against the same run with none.

    .venv/bin/python experiments/benchmarks/tracker_cost.py --output experiments/results/tracker_cost

The run is `rl-fn train sft` of the tiny Qwen2 in a process of its own, with the libraries' offline stores. A run with
trackers and one without go on in turns of a second: while one has its turn, all processes of the other are stopped,
so that a drift of the machine cancels. Seconds are those of a run's own turns. From its last step on a run has the
machine to itself. In "all four, hung" the exporters and the libraries' processes are stopped for ever when each has a
row. Ctrl-C keeps the rounds that are whole. --draw draws again.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from matplotlib.figure import Figure
from scipy.stats import t as student
from tqdm import tqdm

from experiments.machine import facts
from rl_bridge.common.files import replacing, write_json
from rl_bridge.run.options import TRACKERS

HUNG = "all four, hung"
KINDS = {**{name: (name,) for name in TRACKERS}, "all four": TRACKERS, HUNG: TRACKERS}
LIBRARIES = ("tensorboard", "wandb", "mlflow-skinny", "trackio")
MEANS = ("starting_ratio", "added_seconds", "added_at_end")
COMPARED = {"step_ratio": "time of a step", "run_ratio": "time of the run"}
TURN, LONGEST, BLOCK = 1.0, 240.0, 8
"""Seconds of a turn, and of a run's turns together; steps whose time is compared together."""


class Training:
    """A run whose processes are stopped between its turns."""

    def __init__(self, kind: str | None, folder: Path, options: argparse.Namespace) -> None:
        self.kind, self.folder, self.trackers = kind, folder, KINDS[kind] if kind else ()
        self.turns: list[tuple[float, float]] = []
        self.live_at: float | None = None if kind else 0.0
        self._known: dict[int, psutil.Process] = {}
        self._hung: set[int] = set()
        place, words = folder.parent, ["-m", "rl_tools.cli", "train", "sft", "--name", folder.name]
        words += ["--data", str(place / "sums.jsonl"), "--output", str(place), "--held-out", "16"]
        words += ["--steps", str(options.steps), "--rows-per-step", str(options.rows)]
        words += ["--evaluate-every", "100000", "--checkpoint-every", "100000", "--threads", str(options.threads)]
        words += ["--tracker-output", str(place / "stores"), *(["--trackers", *self.trackers] if kind else [])]
        # W&B's process is shared within a process tree that has this name.
        environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        self._said = folder.with_suffix(".log").open("w+", encoding="utf-8")
        self._begun = time.time()
        self._process = subprocess.Popen(
            [sys.executable, *words], stdout=self._said, stderr=self._said, env=environment, start_new_session=True
        )
        self._processes()
        self._stop()

    def turn(self) -> bool:
        """A turn, or all that is left after the last step; whether the run goes on after it."""
        begun = time.time()
        for process in self._processes():
            if process.pid not in self._hung:
                process.resume()
        while self._process.poll() is None and (time.time() < begun + TURN or (self.folder / "summary.json").exists()):
            time.sleep(0.02)
            if self.live_at is None and all(self._rows(name) for name in self.trackers):
                if self.kind == HUNG:
                    self._hung = {process.pid for process in self._processes() if process.pid != self._process.pid}
                    self._stop(self._hung)
                self.live_at = time.time()
        if self._process.poll() is None:
            self._stop()
        self.turns.append((begun, time.time()))
        if sum(end - start for start, end in self.turns) > LONGEST:
            raise RuntimeError(f"the run with {self.kind} did not end in {LONGEST:.0f} s of its own")
        return self._process.returncode is None

    def result(self) -> dict[str, Any]:
        """Seconds of the run's own turns: in all, of each step, to the trackers' first rows, after the last step."""
        self._said.seek(0)
        said = self._said.read()
        told = said.count("still gets the end") if self.kind == HUNG else len(self.trackers)
        bad = self._process.returncode or self.live_at is None or told != len(self.trackers)
        if bad or "is behind this run" in said:
            raise RuntimeError(f"the run with {self.kind} ended with {self._process.returncode}: {said[-3000:]}")
        lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        times = [self._own(record["time"]) for record in map(json.loads, lines) if "stage" in record]
        live = self._own(self.live_at or 0.0)
        before = sum(moment < live for moment in times)
        if before > len(times) - 20:
            raise RuntimeError(f"{self.kind} was live after {before} of {len(times)} steps: give more with --steps")
        steps = [round(after - before, 3) for before, after in itertools.pairwise(times)]
        whole = self._own(self.turns[-1][1])
        seconds = {"seconds": whole, "live_after_seconds": live, "end_seconds": whole - times[-1]}
        return {"kind": self.kind, **seconds, "steps_before_live": before, "seconds_of_steps": steps}

    def close(self) -> None:
        """No process is left: those that hang are killed, as are all where the measurement was broken off."""
        left = list(self._processes())
        for process in left if self._hung or self._process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._said.close()
        _, living = psutil.wait_procs(left, timeout=40.0)
        if living:
            raise RuntimeError(f"processes of the run with {self.kind} did not end in 40 s: {living}")

    def _own(self, moment: float) -> float:
        """Seconds of this run's turns until then."""
        return sum(max(0.0, min(end, moment) - start) for start, end in self.turns)

    def _rows(self, tracker: str) -> int:
        states = [json.loads(file.read_text("utf-8")) for file in self.folder.glob(f"exports/{tracker}-*.json")]
        return sum(state["tails"]["metrics"]["rows"] for state in states)

    def _stop(self, only: set[int] | None = None) -> None:
        """Stop processes, and those that they have started meanwhile."""
        stopped: set[int] = set()
        while new := [process for process in self._processes() if process.pid not in stopped]:
            for process in new:
                stopped.add(process.pid)
                if only is None or process.pid in only:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()

    def _processes(self) -> Iterator[psutil.Process]:
        """The trainer, its exporters and what these have started; who lives of them, also after the trainer's end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer = psutil.Process(self._process.pid)
            for process in [trainer, *trainer.children(recursive=True)]:
                self._known[process.pid] = process
        return filter(psutil.Process.is_running, list(self._known.values()))


def pair(kind: str, place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A run without trackers and one with them, in turns."""
    number = len(list(place.glob("run-*.log")))
    with contextlib.ExitStack() as stack:
        runs = []
        for one in (None, kind):
            runs.append(Training(one, place / f"run-{number + len(runs):03d}", options))
            stack.callback(runs[-1].close)
        waiting = list(runs)
        while waiting:
            waiting = [run for run in waiting if run.turn()]
        return [run.result() for run in runs]


def compared(without: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """A pair of runs, by their steps of the same numbers: after the trackers' first rows, and (starting) before."""
    times = [one["seconds_of_steps"] for one in (without, run)]
    starts = range(run["steps_before_live"], len(times[0]) - BLOCK + 1, BLOCK)
    blocks = [[sum(of_run[start : start + BLOCK]) for start in starts] for of_run in times]
    begun = [sum(of_run[: max(1, run["steps_before_live"])]) for of_run in times]
    return {
        "kind": run["kind"],
        "step_ratios": [own / plain for plain, own in zip(*blocks, strict=True)],
        "starting_ratio": begun[1] / begun[0],
        "steps_before_live": run["steps_before_live"],
        "run_ratio": run["seconds"] / without["seconds"],
        "added_seconds": run["seconds"] - without["seconds"],
        "added_at_end": run["end_seconds"] - without["end_seconds"],
    }


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kind → mean ratio of blocks of steps and of whole runs with 95 % intervals, and mean seconds."""
    by_kind = {kind: [one for one in pairs if one["kind"] == kind] for kind in dict.fromkeys(p["kind"] for p in pairs)}
    steps = intervals({kind: [ratio for one in own for ratio in one["step_ratios"]] for kind, own in by_kind.items()})
    runs = intervals({kind: [one["run_ratio"] for one in own] for kind, own in by_kind.items()})
    return {
        kind: {
            "pairs": len(own),
            "step_ratio": steps[kind],
            "run_ratio": runs[kind],
            "steps_before_live": [one["steps_before_live"] for one in own],
            **{name: statistics.mean(one[name] for one in own) for name in MEANS},
        }
        for kind, own in by_kind.items()
    }


def intervals(ratios: dict[str, list[float]]) -> dict[str, list[float]]:
    """Kind → geometric mean, low, high: Student's t with one deviation for all kinds, for the noise is the machine's.

    One value of each kind has no interval.

    >>> [round(value, 3) for value in intervals({"a": [1.0, 1.1], "b": [0.9, 1.0]})["a"]]
    [1.049, 0.845, 1.302]
    """
    logs = {kind: [math.log(ratio) for ratio in own] for kind, own in ratios.items()}
    means = {kind: statistics.mean(own) for kind, own in logs.items()}
    freedom = sum(len(own) - 1 for own in logs.values())
    if not freedom:
        return {kind: [math.exp(mean)] for kind, mean in means.items()}
    squares = sum((value - means[kind]) ** 2 for kind, own in logs.items() for value in own)
    wide = float(student.ppf(0.975, freedom)) * math.sqrt(squares / freedom)
    halves = {kind: wide / math.sqrt(len(own)) for kind, own in logs.items()}
    return {kind: [math.exp(mean + side * halves[kind]) for side in (0, -1, 1)] for kind, mean in means.items()}


def told(ratio: Sequence[float]) -> str:
    """
    >>> told([1.0]), told([1.0, 0.9, 1.1])
    ('1.000', '1.000 [0.900, 1.100]')
    """
    mean, *ends = (f"{value:.3f}" for value in ratio)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| trackers | time of a step | steps before the first row: how many, their time | time of the run "
        "| seconds more | of these after the last step |",
        "|---|---|---|---|---|---|",
    ]
    for kind, one in found.items():
        step, run = (told(one[name]) for name in COMPARED)
        first = f"{', '.join(map(str, one['steps_before_live']))}: {one['starting_ratio']:.2f}"
        lines.append(
            f"| {kind} | {step} | {first} | {run} | {one['added_seconds']:+.1f} | {one['added_at_end']:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(folder: Path) -> None:
    """table.md, tracker_cost.png and what is derived in tracker_cost.json, from the runs in there."""
    measured = json.loads((folder / "tracker_cost.json").read_text("utf-8"))
    pairs = [compared(*runs) for runs in zip(measured["runs"][::2], measured["runs"][1::2], strict=True)]
    found = summary(pairs)
    write_json(folder / "tracker_cost.json", {**measured, "summary": found, "pairs": pairs})
    (folder / "table.md").write_text(table(found), "utf-8")
    figure = Figure(figsize=(9, 0.5 * len(found) + 1.3), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), COMPARED.items(), strict=True):
        for place, one in enumerate(found.values()):
            mean, *ends = one[name]
            axes.plot(mean, place, "o", color="C0")
            axes.plot(ends, [place] * len(ends), "|-", color="C0")
        axes.axvline(1.0, color="gray", linewidth=0.8)
        axes.set(title=title, xlabel="against none", yticks=range(len(found)), yticklabels=list(found))
    figure.axes[0].invert_yaxis()
    with replacing(folder / "tracker_cost.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def save(options: argparse.Namespace, rounds: Sequence[Sequence[Sequence[dict[str, Any]]]]) -> None:
    """tracker_cost.json, table.md and the figure."""
    options.output.mkdir(parents=True, exist_ok=True)
    described = {name: getattr(options, name) for name in ("steps", "rows", "threads")}
    libraries = {name: version(name) for name in LIBRARIES}
    measured = {"libraries": libraries, "hardware_and_versions": facts()}
    runs = [run for pairs in rounds for runs in pairs for run in runs]
    write_json(options.output / "tracker_cost.json", {"run": described, **measured, "runs": runs})
    draw(options.output)
    print((options.output / "table.md").read_text("utf-8"))


def main() -> None:
    """Measure, and write tracker_cost.json, table.md and tracker_cost.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw what is there")
    options = parser.parse_args()
    if options.draw:
        draw(options.output)
        return
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10, 60) for b in range(10, 60)]
    rounds: list[list[list[dict[str, Any]]]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=options.rounds * len(options.only), unit="pair") as bar:
        place = Path(temporary)
        (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums), "utf-8")
        try:
            bar.set_description("making the stores")
            first = Training("all four", place / "run-first", argparse.Namespace(**{**vars(options), "steps": 10}))
            with contextlib.closing(first):
                while first.turn():
                    pass
            for _ in range(options.rounds):
                pairs = []
                for kind in options.only:
                    bar.set_description(kind)
                    pairs.append(pair(kind, place, options))
                    bar.update()
                rounds.append(pairs)
        except KeyboardInterrupt:
            if not rounds:
                raise
    save(options, rounds)


if __name__ == "__main__":
    main()
