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

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
import torch

from rl_bridge.common.append_log import AppendLog
from rl_bridge.common.plots import spared
from rl_bridge.executors.executor import Executor
from rl_bridge.executors.host import Host
from rl_bridge.run.run import Observer, Run
from rl_tools.profile.live_bytes import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, LiveBytes, Peak
from rl_tools.profile.timeline import draw_memory, growth, shown_bytes

POINTS = 48
"""Most points of a call's timeline."""


class Meter(Protocol):
    """Measures calls one after another in a worker's process."""

    def watch(self, module: torch.nn.Module) -> None:
        """Know a model's weights and gradients from now on."""
        ...

    def call(self) -> Any:
        """A context that measures the call inside."""
        ...

    def now(self) -> int:
        """Bytes that live."""
        ...

    def peak(self) -> Peak:
        """The peak of the last call."""
        ...

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """Seconds since the last call began, and bytes by component."""
        ...

    def by_line(self) -> Counter[str]:
        """Bytes that live now, by the line that allocated them."""
        ...


class _Timed(LiveBytes):
    """Live bytes with a point of the timeline wherever they changed by a twentieth of the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[float, dict[str, int]]] = []
        self._began, self._last, self._share = time.monotonic(), 0, 0.05

    def begin(self) -> None:
        self.reset()
        self._began, self._share = time.monotonic(), 0.05
        self.points = []
        self._point()

    def _point(self) -> None:
        self._last = self.bytes
        self.points.append((time.monotonic() - self._began, {k: v for k, v in self.components.items() if v}))
        if len(self.points) > POINTS:
            self.points, self._share = self.points[::2], 2 * self._share

    def _change(self, component: str, size: int, line: str = "") -> None:
        super()._change(component, size, line)
        if abs(self.bytes - self._last) > self._share * self._peak.bytes:
            self._point()


class LiveMeter:
    """Counts every allocation of the calls, for a CPU."""

    def __init__(self) -> None:
        self._live = _Timed()

    def watch(self, module: torch.nn.Module) -> None:
        """Know a model's weights and gradients."""
        self._live.watch(module)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Measure the call inside."""
        self._live.begin()
        with self._live:
            yield
        self._live._point()

    def now(self) -> int:
        """Bytes that live."""
        return self._live.bytes

    def peak(self) -> Peak:
        """The peak of the last call."""
        return self._live.peak()

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """Points of the last call, at most ``POINTS``."""
        return self._live.points

    def by_line(self) -> Counter[str]:
        """Bytes that live now."""
        return self._live.by_line()


class AllocatorMeter:
    """CUDA's caching allocator: its peak, and its history of allocations with their Python stacks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: list[torch.nn.Module] = []
        self._peak, self._events = Peak(0, {}, ""), cast(list[dict[str, Any]], [])
        torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=1 << 16)

    def watch(self, module: torch.nn.Module) -> None:
        """Know a model's weights and gradients."""
        self._models.append(module)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Measure the call inside."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=1 << 16)
        yield
        torch.cuda.synchronize(self._device)
        history: Any = torch.cuda.memory._snapshot(self._device)
        traces = history["device_traces"]
        self._events = traces[self._device.index or 0]
        most = torch.cuda.max_memory_allocated(self._device)
        components = self._components()
        parts = {**components, ACTIVATIONS: max(0, most - sum(components.values()))}
        self._peak = Peak(most, parts, line_of_peak(before, self._events))

    def now(self) -> int:
        """Bytes that are allocated."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> Peak:
        """The peak of the last call."""
        return self._peak

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """No points: the allocator has no components over time."""
        return []

    def by_line(self) -> Counter[str]:
        """Bytes by line, of the last call's allocations that still live."""
        living: dict[int, tuple[str, int]] = {}
        for event in self._events:
            if event["action"] == "alloc":
                living[event["addr"]] = _line(event["frames"]), event["size"]
            elif event["action"] == "free_completed":
                living.pop(event["addr"], None)
        sizes: Counter[str] = Counter()
        for line, size in living.values():
            sizes[line] += size
        return sizes

    def _components(self) -> dict[str, int]:
        sizes = {WEIGHTS: 0, GRADIENTS: 0, OPTIMIZER: 0}
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                sizes[WEIGHTS] += _bytes_on(tensor, self._device)
                sizes[GRADIENTS] += 0 if tensor.grad is None else _bytes_on(tensor.grad, self._device)
            optimizer = getattr(model, "optimizer", None)
            for state in [] if optimizer is None else optimizer.state.values():
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                sizes[OPTIMIZER] += sum(_bytes_on(value, self._device) for value in tensors)
        return sizes


def line_of_peak(before: int, events: Sequence[dict[str, Any]]) -> str:
    """The line whose allocation made the most bytes live, by the allocator's history.

    >>> frames = [{"filename": "x/rl_bridge/algorithms/a.py", "line": 7, "name": "f"}]
    >>> line_of_peak(5, [{"action": "alloc", "addr": 1, "size": 9, "frames": frames}])
    'rl_bridge/algorithms/a.py:7 f'
    """
    now = most = before
    line = ""
    for event in events:
        if event["action"] == "alloc":
            now += event["size"]
            if now > most:
                most, line = now, _line(event["frames"])
        elif event["action"] == "free_completed":
            now -= event["size"]
    return line


def _line(frames: Sequence[dict[str, Any]]) -> str:
    for frame in frames:
        for part in ("/rl_bridge/", "/rl_kernels/", "/modeling_"):
            file = frame["filename"]
            if part in file and "/rl_bridge/memory/" not in file and "/rl_tools/" not in file:
                return f"{file[file.rindex(part) + 1 :]}:{frame['line']} {frame['name']}"
    return "outside of rl_bridge"


def _bytes_on(tensor: torch.Tensor, device: torch.device) -> int:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return local.numel() * local.element_size() if local.device == device else 0


def meter_of(device: torch.device) -> Meter:
    """The meter that fits the device."""
    return AllocatorMeter(device) if device.type == "cuda" else LiveMeter()


def resident_bytes() -> int:
    """Memory that this process has of the machine's."""
    return psutil.Process().memory_info().rss


LOOKED_AT, SKIPPED = 64, 2
"""Last steps that are searched for a leak, and first steps that are left out, as they make lasting tensors."""
_METHODS = {"token_logprobs": "scoring", "values": "scoring", "scores": "scoring", "train_step": "update"}
_METHODS |= {"optimizer_step": "update", "nll": "scoring", "pair_scores": "scoring"}
_METHODS |= {"completion_logprobs": "scoring", "completion_rewards": "scoring", "backward_through": "update"}
_METHODS |= dict.fromkeys(("generate", "converse", "complete", "advance", "conversations"), "generation")
_FUNCTIONS = {"transfer": "sync", "stage": "checkpoint", "build_worker": "build"}


class SlotProfiler:
    """Runs the functions of a host in one worker's process, and measures them."""

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
        """Close a step; returns its peak, its live bytes and, if they leak, their growth and its line."""
        self._ends.append(self._meter.now())
        self._lines.append(self._meter.by_line())
        self._ends, self._lines = self._ends[-LOOKED_AT - SKIPPED :], self._lines[-LOOKED_AT - SKIPPED :]
        self._write(end_of_step=True)
        self._step = step + 1
        numbers: dict[str, Any] = {"memory_peak": float(self._most), "memory_live": float(self._ends[-1])}
        self._most = 0
        leak = growth(self._ends[SKIPPED:])
        if leak is not None:
            growth_by_line = self._lines[-1] - self._lines[SKIPPED]
            line = growth_by_line.most_common(1)[0][0] if growth_by_line else "unknown lines"
            numbers |= {"memory_growth": leak.per_step, "line": line}
        return numbers

    def _watch(self) -> None:
        for worker in self._host.workers.values():
            module = getattr(worker.module, "_model", worker.module)
            if isinstance(module, torch.nn.Module) and id(module) not in self._known:
                self._known.add(id(module))
                self._meter.watch(module)

    def _write(self, **fields: Any) -> None:
        line = {"time": time.time(), "step": self._step, "slot": self._host.slot, **fields}
        line |= {"bytes": self._meter.now(), "rss": resident_bytes()}
        with AppendLog(self._file) as log:
            log.append(line)


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


class MemoryProfiler(Observer):
    """Profiles the workers of a run while it lasts, with ``memory.jsonl`` and ``memory.png`` in its folder.

    Steps get ``memory_peak`` and ``memory_live`` in metrics.jsonl, of the slot that has most, and ``memory_growth``
    from the step on at which a leak is sure.
    """

    serves = ("memory",)

    def __init__(self) -> None:
        self._executor: Executor | None = None
        self._leak_told = False

    def started(self, run: Run) -> None:
        """Begin to measure.

        Raises:
            ValueError: the run was made without its executor.
        """
        if run.executor is None:
            raise ValueError(
                "a memory profiler measures in the workers of the run: Run(executor=…) says where they are"
            )
        self._run, self._executor = run, run.executor
        self._in_slots(install, run.folder)

    def metrics(self, number: int) -> dict[str, float]:
        """The peak of the step, the bytes that live after the step and, if they leak, their growth."""
        slots = self._in_slots(mark, number)
        numbers = {name: max(slot[name] for slot in slots) for name in ("memory_peak", "memory_live")}
        if leaks := [slot for slot in slots if "memory_growth" in slot]:
            worst = max(leaks, key=lambda slot: slot["memory_growth"])
            numbers["memory_growth"] = worst["memory_growth"]
            if not self._leak_told:
                each, line = shown_bytes(int(worst["memory_growth"])), worst["line"]
                self._run.print(f"record {number}: memory grows by {each} a step; the most is allocated at {line}")
                self._leak_told = True
        return numbers

    def ended(self, error: BaseException | None) -> None:
        """Draw the figure, and stop measuring."""
        if self._executor is None:
            return
        if (self._run.folder / "memory.jsonl").is_file():
            with spared("memory.png"):
                draw_memory(self._run.folder / "memory.jsonl", self._run.folder / "memory.png")
        self._in_slots(uninstall)

    def _in_slots(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        assert self._executor is not None
        slots = dict.fromkeys([slot.index for slot in self._executor.slots], arguments)
        return list(self._executor.call(function, slots, what="memory profiler").values())
