"""Time of a call, and kernels it launches: ways to one result on one device, in turns, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

Call = Callable[[], Any]
# Calls between two events: launches are queued, so that the device does not wait for the host.
_QUEUED = 20


def _once(calls: Sequence[Call], on: torch.device) -> float:
    """Seconds a call, each of ``calls`` in its turn: with inputs larger than caches none finds its own there."""
    if on.type != "cuda":
        start = time.process_time()
        calls[0]()
        return time.process_time() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for i in range(_QUEUED):
        calls[i % len(calls)]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / _QUEUED


def compare(ways: Mapping[str, Sequence[Call]], on: torch.device, turns: int) -> dict[str, dict[str, Any]]:
    """Median and quartiles of the seconds, and launches, of each way; or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    for name, calls in ways.items():
        try:
            for call in calls:
                call()
            found[name] = {"launches": launches(calls[0]) if on.type == "cuda" else None}
            times[name] = []
        except ImportError as error:
            found[name] = {"missing": str(error)}
        except torch.OutOfMemoryError:
            found[name] = {"missing": "out of memory"}
    for turn in range(turns):
        for name in list(times)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(_once(ways[name], on))
    for name, seconds in times.items():
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        found[name] |= {"seconds": statistics.median(seconds), "quartiles": [quartiles[0], quartiles[2]]}
    return found


def launches(call: Call) -> int:
    """Kernels and copies that one call starts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in profile.events() or ())


def versions(*packages: str) -> dict[str, str]:
    """Of peers that harness.facts does not name."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
