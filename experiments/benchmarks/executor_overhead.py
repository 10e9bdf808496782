"""What a call costs, from the driver to a worker and back, by executor.

python experiments/benchmarks/executor_overhead.py    # writes experiments/results/executor_overhead/

Each executor is measured in a process, or a job, of its own. The batch is 64 rows of 4096 tokens, int64 and float32,
split over two workers: 3.1 MB.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import rl_bridge
from experiments.benchmarks.jobs import run
from rl_bridge.executors.session import Name

OUT = Path(__file__).parents[1] / "results" / "executor_overhead"
KINDS = ("local", "torchrun", "ray")
ROWS, TOKENS = 64, 4096

# Microseconds.
TARGETS = {
    ("local", "empty call"): 50,
    ("torchrun", "empty call, worker 1"): 1000,
    ("ray", "empty call, worker 1"): 3000,
    ("torchrun", "batch over two workers"): 10_000,
}


def nothing(host, *batch) -> None:
    """What is measured is the way there and back."""


def measure(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds: the median of the calls, and the slowest of a hundred."""
    for _ in range(repeats // 10):
        call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    found = sorted(1e6 * second for second in seconds)
    return {"median_us": round(statistics.median(found), 1), "p99_us": round(found[int(0.99 * repeats)], 1)}


def measurements(kind: Name, repeats: int) -> dict[str, object]:
    """All calls of one executor; in the job that is its own."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    executor = rl_bridge.init("ray", slots=[{"CPU": 1}] * 2) if kind == "ray" else rl_bridge.init(kind)
    started = round(time.perf_counter() - start, 2)
    batch = torch.zeros(ROWS, TOKENS, dtype=torch.long), torch.zeros(ROWS, TOKENS)
    shares = {
        slot.index: tuple(part.chunk(len(executor.slots))[slot.index] for part in batch) for slot in executor.slots
    }

    def empty(slots: list[int]) -> Callable[[], object]:
        return lambda: executor.call(nothing, dict.fromkeys(slots, ()), what="empty")

    calls = {"empty call": empty([0])}
    if len(executor.slots) > 1:
        calls = {
            "empty call, worker 0": empty([0]),
            "empty call, worker 1": empty([1]),
            "empty call, both workers": empty([0, 1]),
            "batch over two workers": lambda: executor.call(nothing, shares, what="batch"),
        }
    found = {name: measure(call, repeats if "empty" in name else repeats // 5) for name, call in calls.items()}
    executor.stop()
    return {"executor": kind, "start_seconds": started, "calls": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--kind", choices=KINDS, help="measure this one here")
    parser.add_argument("--result", type=Path, help="where --kind writes")
    options = parser.parse_args()
    if options.kind:
        found = measurements(options.kind, options.repeats)
        options.result.write_text(json.dumps(found))
        return
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = (str(Path(__file__).resolve()), "--kind", kind, "--result", str(result))
            command += ("--repeats", str(options.repeats))
            code, output, left = run(2, *command, timeout=600, torchrun=kind == "torchrun")
            if code or left:
                raise RuntimeError(f"{kind} ended with exit code {code}, left {left} and said\n{output}")
            rows.append(json.loads(result.read_text()))
            print(json.dumps(rows[-1]), flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    described = {
        "command": "python experiments/benchmarks/executor_overhead.py",
        "repeats": options.repeats,
        "batch": f"{ROWS} x {TOKENS} int64 and float32",
        "cores": os.cpu_count(),
        "machine": _processor(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "rows": rows,
    }
    (OUT / "executor_overhead.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    (OUT / "README.md").write_text(table(described), encoding="utf-8")
    print(table(described))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(described: dict) -> str:
    """One line a call."""
    lines = [
        "# What a call costs by executor",
        "",
        f"{described['machine']}, {described['cores']} cores; Python {described['python']},",
        f"torch {described['torch']}, Ray {described['ray']}.",
        f"{described['repeats']} calls, a fifth of that of the batch ({described['batch']}).",
        "",
        "| executor | call | median | 99th percentile | target |",
        "|---|---|---|---|---|",
    ]
    for row in described["rows"]:
        for name, found in row["calls"].items():
            target = TARGETS.get((row["executor"], name))
            wanted = f"{target} µs" if target else ""
            lines.append(f"| {row['executor']} | {name} | {found['median_us']} µs | {found['p99_us']} µs | {wanted} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
