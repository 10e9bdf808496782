"""Memory while a run goes on: a line of memory.jsonl for each call of a worker, leaks found, a figure.

A line of memory.jsonl has

    time        seconds since 1970
    step        the number of the record in metrics.jsonl that follows, from 0
    slot        of the worker's process (its other lines are in memory-slotN.jsonl)
    phase       generation, scoring, update, sync, checkpoint, build or other
    call        the function, or the engine's method
    seconds     that it took
    bytes       that lived after it
    peak        the most that lived during it
    components  bytes at the peak: weights, gradients, optimizer, activations, head, kv_cache, transfer, checkpoint
    line        file:line function that allocated the last of the peak
    rss         bytes of the process
    timeline    [[seconds since the call began, {component: bytes}], …]

and a line with ``end_of_step`` true has bytes and rss after a whole step.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rl_bridge.executors.base import Executor
from rl_bridge.executors.host import Host
from rl_bridge.memory.figure import draw_memory
from rl_bridge.memory.leaks import growth
from rl_bridge.memory.meters import Meter, meter_of, resident_bytes
from rl_bridge.memory.sizes import shown_bytes
from rl_bridge.plots import spared
from rl_bridge.tracking.run import Run

LOOKED_AT, SKIPPED = 64, 2
"""Last steps that a leak is looked for in, and first steps that make what stays."""
_METHODS = {"token_logprobs": "scoring", "values": "scoring", "scores": "scoring", "train_step": "update"}
_METHODS |= {"optimizer_step": "update", "nll": "scoring", "pair_scores": "scoring"}
_METHODS |= {"completion_logprobs": "scoring", "completion_rewards": "scoring", "backward_through": "update"}
_METHODS |= dict.fromkeys(("generate", "converse", "complete", "advance", "conversations"), "generation")
_FUNCTIONS = {"transfer": "sync", "stage": "checkpoint", "build_worker": "build"}


class SlotProfiler:
    """Of one worker's process: it runs the functions of its host, and measures around them."""

    def __init__(self, host: Host, file: Path, meter: Meter) -> None:
        self._host, self._file, self._meter = host, file, meter
        self._known: set[int] = set()
        self._step, self._ends = 0, list[int]()
        self._lines: list[Counter[str]] = []
        self._most = 0

    def __call__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function of the host, and write its line."""
        if function in (mark, uninstall):
            return function(self._host, *arguments)
        self._watch()
        began = time.monotonic()
        with self._meter.call():
            result = function(self._host, *arguments)
        name = function.__name__
        call, phase = name, _FUNCTIONS.get(name, "other")
        if name == "call_worker":
            call = str(arguments[1])
            phase = _METHODS.get(call, "other")
        peak = self._meter.peak()
        self._most = max(self._most, peak.bytes)
        self._write(
            phase=phase,
            call=call,
            seconds=round(time.monotonic() - began, 6),
            peak=peak.bytes,
            components={part: size for part, size in peak.components.items() if size},
            line=peak.line,
            timeline=[[round(at, 6), parts] for at, parts in self._meter.timeline()],
        )
        return result

    def end_of_step(self, step: int) -> dict[str, Any]:
        """Close a step: its peak, what lives, and how that grows if it is a leak."""
        self._ends.append(self._meter.now())
        self._lines.append(self._meter.by_line())
        self._ends, self._lines = self._ends[-LOOKED_AT - SKIPPED :], self._lines[-LOOKED_AT - SKIPPED :]
        self._write(end_of_step=True)
        self._step = step + 1
        found: dict[str, Any] = {"memory_peak": float(self._most), "memory_live": float(self._ends[-1])}
        self._most = 0
        grown = growth(self._ends[SKIPPED:])
        if grown is not None:
            more = self._lines[-1] - self._lines[SKIPPED]
            line = more.most_common(1)[0][0] if more else "unknown lines"
            found |= {"memory_growth": grown.per_step, "line": line}
        return found

    def _watch(self) -> None:
        for worker in self._host.workers.values():
            module = getattr(worker.module, "_model", worker.module)
            if isinstance(module, torch.nn.Module) and id(module) not in self._known:
                self._known.add(id(module))
                self._meter.watch(module)

    def _write(self, **fields: Any) -> None:
        line = {"time": time.time(), "step": self._step, "slot": self._host.slot, **fields}
        line |= {"bytes": self._meter.now(), "rss": resident_bytes()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def install(host: Host, folder: Path) -> None:
    """Begin to profile a slot."""
    name = "memory.jsonl" if host.slot == 0 else f"memory-slot{host.slot}.jsonl"
    host.observer = SlotProfiler(host, folder / name, meter_of(host.device))


def mark(host: Host, step: int) -> dict[str, Any]:
    """Tell a slot that a step is over."""
    assert isinstance(host.observer, SlotProfiler)
    return host.observer.end_of_step(step)


def uninstall(host: Host) -> None:
    """Stop profiling a slot."""
    host.observer = None


@contextmanager
def profiled(run: Run, executor: Executor, wanted: bool) -> Iterator[None]:
    """Profile the workers of a run while it lasts, with ``memory.jsonl`` and ``memory.png`` in its folder.

    Steps get ``memory_peak`` and ``memory_live`` in metrics.jsonl, of the slot that has most, and ``memory_growth``
    from the step on at which a leak is sure. Without ``wanted`` nothing is done.
    """
    if not wanted:
        yield
        return
    slots = [slot.index for slot in executor.slots]
    executor.call(install, dict.fromkeys(slots, (run.folder,)), what="memory profiler")
    told = False

    def after(step: int) -> dict[str, float]:
        nonlocal told
        found = executor.call(mark, dict.fromkeys(slots, (step,)), what="memory profiler").values()
        numbers = {name: max(one[name] for one in found) for name in ("memory_peak", "memory_live")}
        if leaks := [one for one in found if "memory_growth" in one]:
            worst = max(leaks, key=lambda one: one["memory_growth"])
            numbers["memory_growth"] = worst["memory_growth"]
            if not told:
                each = shown_bytes(int(worst["memory_growth"]))
                run.print(f"record {step}: memory grows by {each} a step; the most is allocated at {worst['line']}")
                told = True
        return numbers

    run.after_step = after
    try:
        yield
    finally:
        run.after_step = None
        executor.call(uninstall, dict.fromkeys(slots, ()), what="memory profiler")
        if (run.folder / "memory.jsonl").is_file():
            with spared("memory.png"):
                draw_memory(run.folder / "memory.jsonl", run.folder / "memory.png")
