"""Memory and time of several ways to one result, each in a process of its own, in turns.

A benchmark gives ``WAYS`` (name → a function of a problem that returns a scalar loss to differentiate, or raises
ImportError where its library is missing) and ``problem(case, device)``; this file runs them, compares their gradients,
and writes JSON, a table and a plot.

Memory: the most that forward and backward need above what was there before, inputs included; the first call of a
process, after one of a small problem. On a CPU that is the resident set (VmHWM of /proc/self/status, set back by
/proc/self/clear_refs), on a GPU torch.cuda.max_memory_allocated. Time: on a CPU the process's own seconds (of all its
threads), which other work on the machine changes little; memory that is freed goes back to the system at once, so that
what is resident is alive, at the price of pages that are new for every large array, in every way alike.
"""

import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from limits import clock, reached

PACKAGES = ("rl-fn", "torch", "triton", "trl", "liger-kernel", "cut-cross-entropy")
RESULTS = Path(__file__).parent / "results"
Case = Mapping[str, int]
Way = Callable[..., torch.Tensor]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _start_counting(on: torch.device) -> int:
    gc.collect()
    if on.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _peak(on: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if on.type == "cuda" else _resident("VmHWM")


def _call(way: Way, leaves: Sequence[torch.Tensor], rest: Any, on: torch.device) -> tuple[float, float]:
    """Seconds of forward and backward; gradients are left in the leaves."""
    for leaf in leaves:
        leaf.grad = None
    start = clock(on)
    loss = way(*leaves, **rest)
    middle = clock(on)
    loss.backward()
    return middle - start, clock(on) - middle


def one(way: Way, problem: Callable[..., Any], case: Case, small: Case, repeats: int) -> dict[str, Any]:
    """What a child process measures and prints."""
    on = device()
    try:
        _call(way, *problem(small, on), on)
    except ImportError as error:
        return {"missing": str(error)}
    leaves, rest = problem(case, on)
    before = _start_counting(on)
    try:
        times = [_call(way, leaves, rest, on)]
        extra = _peak(on) - before
        # Now: a way that writes the gradient over its input has other inputs the next time.
        norms = [leaf.grad.double().norm().item() for leaf in leaves if leaf.grad is not None]
        times += [_call(way, leaves, rest, on) for _ in range(repeats - 1)]
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    forward, both = min(t[0] for t in times), min(sum(t) for t in times)
    needed = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return {"extra": extra, "gradients": needed, "forward_s": forward, "both_s": both, "norms": norms}


def child(ways: Mapping[str, Way], problem: Callable[..., Any], request: str) -> None:
    """Answer a request of ``everything`` on the standard output."""
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    print(json.dumps(one(ways[asked["way"]], problem, asked["case"], asked["small"], asked["repeats"])))


def everything(
    script: str, ways: Sequence[str], cases: Sequence[Case], small: Case, *, turns: int, threads: int
) -> list[dict[str, Any]]:
    """Every way on every case, ``turns`` times in alternating order: the least time, the most memory."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    on = device()
    # Without it glibc raises the threshold to 32 MiB, and keeps what is freed below that.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    for turn in range(turns):
        for number, case in enumerate(cases):
            for way in ways[:: 1 if turn % 2 == 0 else -1]:
                if rows.get((number, way), {}).keys() & {"missing", "out_of_memory", "failed"}:
                    continue
                repeats = 5 if on.type == "cuda" else 1
                request = {"way": way, "case": dict(case), "small": dict(small), "threads": threads, "repeats": repeats}
                command = [sys.executable, script, "--one", json.dumps(request)]
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                if done.returncode:
                    # One way's failure (a peer's, or a process killed for its memory) is a result, not the end.
                    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
                    result: dict[str, Any] = {"failed": last[0]}
                else:
                    result = json.loads(done.stdout.splitlines()[-1])
                row = rows.setdefault((number, way), {"case": dict(case), "way": way, **result})
                for name, choose in (("forward_s", min), ("both_s", min), ("extra", max)):
                    if name in row and name in result:
                        row[name] = choose(row[name], result[name])
                print(turn, dict(case), way, result, flush=True)
    return [rows[number, way] for number in range(len(cases)) for way in ways]


def disagreements(rows: Sequence[dict[str, Any]], tolerance: float) -> list[str]:
    """Where the norms of a way's gradients are not those of the first way that ran on its case."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "norms" in row:
            by_case.setdefault(json.dumps(row["case"], sort_keys=True), []).append(row)
    return [
        f"{row['way']} and {found[0]['way']} on {row['case']}: gradients of norm {b:.6g} and {a:.6g}"
        for found in by_case.values()
        for row in found
        for a, b in zip(found[0]["norms"], row["norms"], strict=True)
        if not abs(a - b) <= tolerance * abs(a)
    ]


def facts(threads: int) -> dict[str, Any]:
    """The machine, versions, date, load, and what it reaches of its limits."""
    on = device()
    if on.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        name = f"{lines[0].split(':')[1].strip() if lines else platform.machine()}, {os.cpu_count()} cores"
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    torch.set_num_threads(threads)
    return {
        "hardware": name,
        "threads": threads if on.type == "cpu" else None,
        "reached": reached(on, torch.bfloat16 if on.type == "cuda" else torch.float32),
        "versions": {"python": platform.python_version(), **found},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": os.getloadavg()[0],
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's numbers: MiB beyond the gradients, MiB in all, seconds forward, seconds in all; or why there are none."""
    if "extra" not in row:
        why = "out of memory" if "out_of_memory" in row else row.get("failed", row.get("missing", ""))
        return [why.replace("|", "/"), "", "", ""]
    beyond = f"{(row['extra'] - row['gradients']) / 2**20:.0f}"
    return [beyond, f"{row['extra'] / 2**20:.0f}", f"{row['forward_s']:.3f}", f"{row['both_s']:.3f}"]


def preamble(result: Mapping[str, Any]) -> str:
    """Where and how it was measured."""
    facts = result["facts"]
    threads = f", {facts['threads']} threads" if facts["threads"] else ""
    reached = facts["reached"]
    return (
        f"{facts['hardware']}{threads}; {facts['date']}; load {facts['load']:.1f} at the start, of other work; "
        f"{result['turns']} turn{'s' * (result['turns'] > 1)}, the least time and the most memory of them"
        f"{', in seconds of CPU time' if facts['threads'] else ''}.\n"
        f"Reached here by a large product {1e3 * reached['tflops']:.0f} GFLOP/s, by a copy {reached['gbs']:.0f} GB/s.\n"
        + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        + ".\n"
        + "\n".join(result["disagreements"] or ["The norms of all ways' gradients agree."])
        + "\n"
    )
