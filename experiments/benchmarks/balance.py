"""rl_fn.balance against a plain Karmarkar-Karp in Python objects: 8192 lengths into 512 parts.

python experiments/benchmarks/balance.py    # writes experiments/results/balance/balance.json
"""

import heapq
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rl_fn

OUT = Path(__file__).parents[1] / "results" / "balance" / "balance.json"
ITEMS, PARTS, REPEATS, LONGEST = 8192, 512, 20, 8192


def lengths_of(name: str) -> np.ndarray:
    """Response lengths as rollouts have them: many short, a heavy tail, cut at the limit."""
    rng = np.random.default_rng(0)
    match name:
        case "lognormal":
            return np.clip(rng.lognormal(6.5, 1.0, ITEMS), 16, LONGEST).astype(np.int64)
        case "pareto":
            return np.clip(200 * (rng.pareto(1.5, ITEMS) + 1), 1, LONGEST).astype(np.int64)
        case "bimodal":
            long = rng.random(ITEMS) < 0.1
            return np.where(long, rng.integers(6000, LONGEST + 1, ITEMS), rng.integers(100, 1500, ITEMS))
        case _:
            raise ValueError(f"no lengths called {name!r}")


def least_heaviest(lengths: np.ndarray) -> float:
    """Lower bound on the heaviest of parts of equal size: the m longest need company, at best the shortest."""
    m = np.arange(1, PARTS + 1)
    long, short = np.cumsum(np.sort(lengths)[::-1]), np.cumsum(np.sort(lengths))
    return float(((long[m - 1] + short[(ITEMS // PARTS - 1) * m - 1]) / m).max())


class Subset:
    """One part of a partial partition."""

    def __init__(self) -> None:
        self.total = 0
        self.items: list[int] = []

    def merged(self, other: "Subset") -> "Subset":
        both = Subset()
        both.total, both.items = self.total + other.total, self.items + other.items
        return both


def karmarkar_karp(lengths: list[int], parts: int) -> list[list[int]]:
    """Largest differencing: merge the two partial partitions of the largest spread, heavy parts with light ones."""
    nothing = Subset()
    heap: list[tuple[int, int, list[Subset]]] = []
    for i, length in enumerate(lengths):
        single = Subset()
        single.total, single.items = length, [i]
        heap.append((-length, i, [single] + [nothing] * (parts - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, order, b = heapq.heappop(heap)
        merged = sorted((x.merged(y) for x, y in zip(a, reversed(b), strict=True)), key=lambda s: -s.total)
        heapq.heappush(heap, (merged[-1].total - merged[0].total, order, merged))
    return [subset.items for subset in heap[0][2]]


def measure(split: Callable[[], list], lengths: np.ndarray, repeats: int) -> dict[str, float]:
    seconds = []
    parts: list = []
    for _ in range(repeats):
        start = time.perf_counter()
        parts = split()
        seconds.append(time.perf_counter() - start)
    loads = np.array([lengths[np.asarray(part, np.int64)].sum() for part in parts])
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "fastest_ms": round(1e3 * min(seconds), 2),
        "slowest_ms": round(1e3 * max(seconds), 2),
        "max_over_mean": round(float(loads.max() / loads.mean()), 6),
    }


def main() -> None:
    rows = []
    for name in ("lognormal", "pareto", "bimodal"):
        lengths = lengths_of(name)
        as_list = lengths.tolist()
        mean = float(lengths.sum()) / PARTS
        row: dict[str, object] = {
            "lengths": name,
            "longest_over_mean": round(float(lengths.max()) / mean, 6),
            "equal_size_bound_over_mean": round(max(1.0, least_heaviest(lengths) / mean), 6),
        }
        for label, split, repeats in (
            ("balance", lambda x=lengths: rl_fn.balance(x, PARTS), REPEATS),
            ("balance_equal_size", lambda x=lengths: rl_fn.balance(x, PARTS, equal_size=True), REPEATS),
            ("karmarkar_karp", lambda x=as_list: karmarkar_karp(x, PARTS), 1),
        ):
            row[label] = measure(split, lengths, repeats)
        rows.append(row)
        print(json.dumps(row))
    result = {
        "command": "python experiments/benchmarks/balance.py",
        "items": ITEMS,
        "parts": PARTS,
        "repeats": REPEATS,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "rows": rows,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
