"""What the end of a run looks like when a worker fails: every drill ten times, each in a job of its own.

python experiments/benchmarks/executor_failures.py    # writes experiments/results/executor_failures/
python experiments/benchmarks/executor_failures.py --times 1 --executors torchrun --drills killed hangs

A drill passes when the job ends within its deadline, with an error that names the cause, and leaves no process behind.
"""

import argparse
import json
import os
import platform
import re
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import rl_bridge
from experiments.benchmarks.jobs import run
from rl_bridge.executors import Executor, WorkerDied
from rl_bridge.executors.placement import place

OUT = Path(__file__).parents[1] / "results" / "executor_failures"
DEADLINE = 90.0
PLACES = {"torchrun": r"rank 1, process \d+ on \S+", "ray": r"actor, process \d+ on \S+"}

# What the output has to say, by drill. Slot 0 is in a collective that slot 1 never joins.
CAUSES = {
    "raises": r"ValueError in slot 1: reward is NaN in row 3\n--- traceback of slot 1 ---\n(?s:.*)in train_step",
    "killed": r"WorkerDied: the worker of slot 1 \({place}\) ended during policy\.train_step",
    "hangs": r"DeadlineExceeded: policy\.train_step: no answer from slots \[0, 1\] in 3 s(?s:.*)slot 1 .*\n.*judge",
    "unplaceable": r"ValueError: (3 slots are needed .* 2 fit; there are|slot 0 needs GPU: 6, .* no node has that)",
    "driver killed": r"slot 1 ends: its driver is gone",
    "killed while the driver computes": r"WorkerDied: the worker of slot 1 \({place}\) ended",
    "killed and restarted": r"after WorkerDied: the worker of slot 1 \({place}\) ended(?s:.*)goes on: \{0: 8\.0, 1: 8",
}

# Under Ray the driver prints what workers say: then nobody is left to.
SILENT = {("ray", "driver killed")}
# torchrun starts its ranks again itself, all of them (--max-restarts).
RAY_ONLY = {"killed and restarted"}


def total(host, slots: list[int]) -> float:
    x = torch.ones(4)
    dist.all_reduce(x, group=host.group(slots))
    return x.sum().item()


def reward_judge() -> None:
    time.sleep(1000)


def train_step(host, how: str) -> float:
    if host.slot == 1:
        time.sleep(0.5)
        if how == "raises":
            raise ValueError("reward is NaN in row 3")
        if how == "hangs":
            reward_judge()
        os.kill(os.getpid(), signal.SIGKILL)
    return total(host, [0, 1])


def drill(name: str, executor: Executor) -> None:
    """Fail, in a job of two slots; does not return."""
    both = [slot.index for slot in executor.slots]
    assert executor.call(total, dict.fromkeys(both, (both,)), what="warm-up") == {0: 8.0, 1: 8.0}
    match name:
        case "raises" | "killed" | "hangs":
            executor.call(train_step, dict.fromkeys(both, (name,)), what="policy.train_step", timeout=3)
        case "unplaceable":
            place(executor.slots, 3, occupied=executor.held)
        case "driver killed":
            executor.submit(train_step, {0: ("hangs",)}, what="policy.train_step")
            executor.submit(lambda host: time.sleep(1000), {1: ()}, what="rollout.generate")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed while the driver computes":
            executor.submit(train_step, {1: ("killed",)}, what="rollout.generate")
            end = time.monotonic() + 6
            while time.monotonic() < end:
                sum(range(1000))
            executor.call(total, {1: ([1],)}, what="next")
        case "killed and restarted":
            try:
                executor.call(train_step, dict.fromkeys(both, ("killed",)), what="policy.train_step", timeout=10)
            except WorkerDied as error:
                print(f"after WorkerDied: {error}")
            executor.restart()
            print("goes on:", executor.call(total, dict.fromkeys(both, (both,)), what="total"))
    raise SystemExit(0)


def job(name: str, kind: str) -> dict[str, object]:
    """Run one drill and judge how it ended."""
    start = time.monotonic()
    command = (str(Path(__file__).resolve()), "--drill", name, "--executors", kind)
    code, output, left = run(2, *command, timeout=DEADLINE, torchrun=kind == "torchrun")
    seconds = time.monotonic() - start
    plain = re.sub(r"^\[rank0\]: ", "", output, flags=re.MULTILINE)  # torch's excepthook writes that
    silent = (kind, name) in SILENT and code == -signal.SIGKILL
    said = silent or bool(re.search(CAUSES[name].replace("{place}", PLACES[kind]), plain))
    passed = (code != 0) == (name not in RAY_ONLY) and said and not left and seconds < DEADLINE
    found: dict[str, object] = {"executor": kind, "drill": name, "passed": passed, "seconds": round(seconds, 1)}
    if not passed:
        found |= {"exit_code": code, "left": left, "said_the_cause": said, "output": output[-6000:]}
    return found


def described(kinds: list[str]) -> dict[str, object]:
    """The machine and the versions."""
    packages = ["torch", *(["ray"] if "ray" in kinds else [])]
    return {
        "command": "python experiments/benchmarks/executor_failures.py",
        "deadline_seconds": DEADLINE,
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def table(found: list[dict]) -> str:
    """One line for each executor and drill."""
    lines = [
        "# How a run ends when a worker fails",
        "",
        "Two workers; worker 0 is inside a collective. Passed: the job ended within its deadline, the error names the",
        "cause, no process is left. Seconds are of the whole job, its start included.",
        "",
        "| executor | drill | passed | seconds (longest) |",
        "|---|---|---|---|",
    ]
    for kind, name in dict.fromkeys((row["executor"], row["drill"]) for row in found):
        rows = [row for row in found if (row["executor"], row["drill"]) == (kind, name)]
        passed = sum(row["passed"] for row in rows)
        seconds = sorted(row["seconds"] for row in rows)
        lines.append(f"| {kind} | {name} | {passed} of {len(rows)} | {seconds[len(rows) // 2]} ({seconds[-1]}) |")
    return "\n".join(lines) + "\n"


def write(result: dict) -> None:
    """The rows so far: the drills take half an hour."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "executor_failures.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (OUT / "README.md").write_text(table(result["rows"]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--executors", nargs="+", default=["torchrun", "ray"])
    parser.add_argument("--drills", nargs="+", default=list(CAUSES))
    parser.add_argument("--drill", help="run this one here")
    options = parser.parse_args()
    if options.drill:
        torch.set_num_threads(1)
        [kind] = options.executors
        if kind == "ray":
            slots = [{"GPU": 6, "CPU": 1}] if options.drill == "unplaceable" else [{"CPU": 1}] * 2
            executor = rl_bridge.init(kind, slots=slots, restarts=1)
        else:
            executor = rl_bridge.init(kind)
        drill(options.drill, executor)
    found = []
    for kind in options.executors:
        for name in options.drills:
            if name in RAY_ONLY and kind != "ray":
                continue
            for _ in range(options.times):
                found.append(job(name, kind))
                print(json.dumps(found[-1]), flush=True)
            write(described(options.executors) | {"rows": found})
    print(table(found))
    sys.exit(0 if all(row["passed"] for row in found) else 1)


if __name__ == "__main__":
    main()
