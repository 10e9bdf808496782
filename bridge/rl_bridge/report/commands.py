"""``rl-fn report RUN...``: the page of some runs, once or while they go on."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rl_bridge.report.page import write_report
from rl_bridge.report.reading import FILES, SUMMARY
from rl_bridge.report.studies import is_study
from rl_bridge.terminal import say
from rl_bridge.tracking.records import METRICS


def run(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(list(words))
    folders: list[Path] = arguments.runs
    output: Path = arguments.output or folders[0] / "report.html"
    if arguments.watch is None:
        _write(folders, output, arguments.title, None)
        return 0
    if not 0 < arguments.watch < float("inf"):
        raise ValueError(f"--watch takes seconds above 0, got {arguments.watch:g}")
    return _watch(folders, output, arguments.title, arguments.watch)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="rl-fn report",
        description="One HTML file about runs, without a network: curves, completions, warnings, options.",
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or of a tuning study")
    made.add_argument("-o", "--output", type=Path, help="the file; report.html in the first folder without")
    made.add_argument("--title", help="of the page; the names of the runs without")
    made.add_argument(
        "--watch",
        nargs="?",
        const=10.0,
        type=float,
        metavar="SECONDS",
        help="write it anew when a run has gone on, looked at every 10 seconds or so many, until all runs have ended",
    )
    return made


def _write(folders: Sequence[Path], output: Path, title: str | None, reload_seconds: float | None) -> None:
    size = write_report(folders, output, title=title, reload_seconds=reload_seconds)
    say(f"{output}: {size / 1e6:.2f} MB", flush=True)


def _watch(folders: Sequence[Path], output: Path, title: str | None, every: float) -> int:
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ValueError(f"{', '.join(missing)} is no folder: begin the run before its report")
    written: object = None
    while True:
        # Looked at before they are read: what comes in between is in the next page.
        present = _state(folders)
        ended = all(is_study(folder) or (folder / SUMMARY).is_file() for folder in folders)
        begun = all(is_study(folder) or _has_a_record(folder) for folder in folders)
        if ended or (begun and present != written):
            _write(folders, output, title, None if ended else every)
            written = present
        if ended:
            return 0
        time.sleep(every)


def _has_a_record(folder: Path) -> bool:
    file = folder / METRICS
    return file.is_file() and b"\n" in file.read_bytes()


def _state(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Size and time of change of every file that a report reads."""
    files = [folder / name for folder in folders for name in FILES]
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
