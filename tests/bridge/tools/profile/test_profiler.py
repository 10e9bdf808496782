"""The profiler: what a run's memory was, where its peak came from, and leaks that are there."""

import ctypes
import gc
import json
import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from rl_bridge.engines import TrainEngine
from rl_bridge.engines.worker import worker_of
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.small import TinySource
from rl_bridge.modules.scoring import TokenScorer
from rl_tools.profile.profiler import MemoryProfiler, line_of_peak
from rl_tools.profile.timeline import growth


class Module(torch.nn.Module):
    """Computes a step; with ``leaks`` it keeps the loss with its graph, as ``total += loss`` does."""

    def __init__(self, leaks: bool):
        super().__init__()
        self.line, self.leaks, self.kept = torch.nn.Linear(64, 64), leaks, []

    def train_step(self) -> None:
        loss = self.line(torch.ones(32 + random.randrange(8), 64)).square().sum()
        if self.leaks:
            self.kept.append(loss)
        else:
            loss.backward()
            self.line.zero_grad()


def steps(folder, leaks: bool, count: int) -> tuple[list[dict], list[str]]:
    executor, said = LocalExecutor("cpu"), []
    profiler = MemoryProfiler()
    profiler.started(SimpleNamespace(folder=folder, executor=executor, print=said.append))
    engine = TrainEngine(lambda: Module(leaks), executor=executor, name="leaking").build()
    records = []
    for number in range(count):
        engine.call("train_step")
        records.append(profiler.metrics(number))
    profiler.ended(None)
    assert executor._host.observer is None
    return records, said


def test_a_planted_leak_is_found_with_its_size(tmp_path):
    records, said = steps(tmp_path, leaks=True, count=24)
    assert len(said) == 1 and "memory grows by" in said[0]
    each = records[-1]["memory_growth"]
    assert 8_000 < each < 40_000  # what autograd saved of one step: the input and the layer's output
    assert "memory_growth" not in records[10]


def test_a_clean_run_is_not_flagged_and_leaves_its_record(tmp_path):
    records, said = steps(tmp_path, leaks=False, count=24)
    assert not said and not any("memory_growth" in record for record in records)
    lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    calls = [line for line in lines if line.get("phase") == "update"]
    assert [line["step"] for line in calls] == list(range(24))
    assert all(line["peak"] >= sum(line["components"].values()) > 0 for line in calls)
    assert sum(line.get("end_of_step", False) for line in lines) == 24
    assert (tmp_path / "memory.png").stat().st_size > 1000


class Keeper(torch.nn.Module):
    """Keeps an array of 64 MiB, and lets go of it, with all that the heap has free, to the system.

    Earlier tests leave free memory in malloc's heap, whose pages stay the process's.
    An array that fits in there adds no page, however large it is.
    """

    def __init__(self):
        super().__init__()
        self.line, self.kept = torch.nn.Linear(2, 2), []

    def keep(self) -> None:
        self.kept.append(torch.ones(1 << 24))

    def drop(self) -> None:
        self.kept.clear()
        ctypes.CDLL(None).malloc_trim(0)


def hole_in_the_heap(size: int, block: int = 30 << 10) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Free memory of ``size`` bytes whose pages are the process's, and the block above that pins it."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(library.malloc(ctypes.c_size_t(block))) for _ in range(size // block)]
    pin = blocks.pop()
    for each in blocks:
        ctypes.memset(each, 1, block)
        library.free(each)
    return library, pin


def test_live_bytes_grow_and_shrink_as_the_process_does(tmp_path):
    """An independent instrument: the operating system's count of the pages that the process has."""
    executor = LocalExecutor("cpu")
    profiler = MemoryProfiler()
    profiler.started(SimpleNamespace(folder=tmp_path, executor=executor, print=print))
    engine = TrainEngine(Keeper, executor=executor, name="keeping").build()
    library, pin = hole_in_the_heap(160 << 20)
    for method in ("drop", "keep", "drop"):
        engine.call(method)
    library.free(pin)
    profiler.ended(None)
    lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    before, kept, dropped = (line for line in lines if line["call"] in ("keep", "drop"))
    for name in ("bytes", "rss"):
        assert abs((kept[name] - before[name]) / (64 << 20) - 1) < 0.05, name
        assert abs(dropped[name] - before[name]) < 0.05 * (64 << 20), name


def test_without_the_workers_of_the_run_there_is_nothing_to_measure(tmp_path):
    profiler = MemoryProfiler()
    with pytest.raises(ValueError, match=r"Run\(executor=…\)"):
        profiler.started(SimpleNamespace(folder=tmp_path, executor=None))
    profiler.ended(None)
    assert not list(tmp_path.iterdir())


def test_a_released_engine_leaves_no_weights_behind():
    source = TinySource(vocabulary=8, hidden=16, layers=1, heads=2)
    engine = TrainEngine(lambda: TokenScorer(source), executor=LocalExecutor("cpu"), name="released").build()
    module = worker_of(engine.executor._host, "released").module
    weights = weakref.ref(next(module.parameters()))
    del module
    gc.disable()
    try:
        engine.release()
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_single_jumps_are_no_leak(seed: int):
    rng = random.Random(seed)
    noise = [1e9 + rng.gauss(0, 1e7) for _ in range(64)]
    jump = [1e9 + rng.gauss(0, 1e5) + (3e8 if n > 20 + seed else 0) for n in range(64)]
    steps_up = [1e9 + 2e8 * (n > 10) + 2e8 * (n > 30) for n in range(64)]
    assert growth(noise) is None and growth(jump) is None and growth(steps_up) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_under_noise_is_found(seed: int):
    rng = random.Random(seed)
    found = growth([1e9 + 5e6 * n + rng.gauss(0, 2e6) for n in range(64)])
    assert found is not None and 4e6 < found.per_step < 6e6


def test_the_line_of_the_peak_of_an_allocators_history():
    def event(action: str, addr: int, size: int, file: str = "x/rl_bridge/a.py") -> dict:
        return {"action": action, "addr": addr, "size": size, "frames": [{"filename": file, "line": 3, "name": "f"}]}

    events = [event("alloc", 1, 10), event("free_completed", 1, 10), event("alloc", 2, 4, "x/rl_bridge/b.py")]
    assert line_of_peak(100, events) == "rl_bridge/a.py:3 f"
    assert line_of_peak(100, events[2:]) == "rl_bridge/b.py:3 f"
    assert line_of_peak(100, [event("alloc", 3, 1, "elsewhere.py")]) == "outside of rl_bridge"
