"""Jobs of tests: those of the benchmarks."""

from experiments.benchmarks.jobs import MARK, marked, orphans, run, start

__all__ = ["MARK", "marked", "orphans", "run", "start"]
