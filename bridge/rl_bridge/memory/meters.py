"""What measures a call in a worker's process: live tensors on a CPU, the allocator's own numbers on a GPU."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import psutil
import torch

from rl_bridge.memory.live import LiveBytes, Peak
from rl_bridge.memory.places import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS

POINTS = 48
"""Of a call's timeline, at most."""


class Meter(Protocol):
    """Measures calls one after another."""

    def watch(self, module: torch.nn.Module) -> None:
        """Know a model's weights and gradients."""
        ...

    def call(self) -> Any:
        """A context that measures what runs in it."""
        ...

    def now(self) -> int:
        """Bytes that live."""
        ...

    def peak(self) -> Peak:
        """Of the last call."""
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
    """Counts every allocation of the calls."""

    def __init__(self) -> None:
        self._live = _Timed()

    def watch(self, module: torch.nn.Module) -> None:
        """Know a model's weights and gradients."""
        self._live.watch(module)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Measure what runs here."""
        self._live.begin()
        with self._live:
            yield
        self._live._point()

    def now(self) -> int:
        """Bytes that live."""
        return self._live.bytes

    def peak(self) -> Peak:
        """Of the last call."""
        return self._live.peak()

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """Of the last call."""
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
        """Measure what runs here."""
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
        known = self._components()
        parts = {**known, ACTIVATIONS: max(0, most - sum(known.values()))}
        self._peak = Peak(most, parts, line_of_peak(before, self._events))

    def now(self) -> int:
        """Bytes that are allocated."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> Peak:
        """Of the last call."""
        return self._peak

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """The allocator tells no components over time."""
        return []

    def by_line(self) -> Counter[str]:
        """Of the last call's allocations that still live."""
        living: dict[int, tuple[str, int]] = {}
        for event in self._events:
            if event["action"] == "alloc":
                living[event["addr"]] = _line(event["frames"]), event["size"]
            elif event["action"] == "free_completed":
                living.pop(event["addr"], None)
        found: Counter[str] = Counter()
        for line, size in living.values():
            found[line] += size
        return found

    def _components(self) -> dict[str, int]:
        sizes = {WEIGHTS: 0, GRADIENTS: 0, OPTIMIZER: 0}
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                sizes[WEIGHTS] += _bytes_on(tensor, self._device)
                sizes[GRADIENTS] += 0 if tensor.grad is None else _bytes_on(tensor.grad, self._device)
            optimizer = getattr(model, "optimizer", None)
            for state in [] if optimizer is None else optimizer.state.values():
                held = [value for value in state.values() if isinstance(value, torch.Tensor)]
                sizes[OPTIMIZER] += sum(_bytes_on(value, self._device) for value in held)
        return sizes


def line_of_peak(before: int, events: Sequence[dict[str, Any]]) -> str:
    """The line whose allocation made the most bytes live, by the allocator's history.

    >>> frames = [{"filename": "x/rl_bridge/trainers/a.py", "line": 7, "name": "f"}]
    >>> line_of_peak(5, [{"action": "alloc", "addr": 1, "size": 9, "frames": frames}])
    'rl_bridge/trainers/a.py:7 f'
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
            if part in file and "/rl_bridge/memory/" not in file:
                return f"{file[file.rindex(part) + 1 :]}:{frame['line']} {frame['name']}"
    return "outside of rl_bridge"


def _bytes_on(tensor: torch.Tensor, device: torch.device) -> int:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return local.numel() * local.element_size() if local.device == device else 0


def meter_of(device: torch.device) -> Meter:
    """What fits the device."""
    return AllocatorMeter(device) if device.type == "cuda" else LiveMeter()


def resident_bytes() -> int:
    """Memory that this process has of the machine's."""
    return psutil.Process().memory_info().rss
