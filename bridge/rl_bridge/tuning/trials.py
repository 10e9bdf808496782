"""The processes of a study: each repetition with its own session, run folder, log, device and exit status."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_bridge.tuning import guard
from rl_bridge.tuning.scheduler import Exit
from rl_bridge.tuning.space import Assignment
from rl_bridge.tuning.state import Key

LAST_LINES = 3
LOGS, RUNS = "logs", "runs"


@dataclass(frozen=True)
class Place:
    """Where the process of a slot runs."""

    device: str | None = None
    """For CUDA_VISIBLE_DEVICES."""
    threads: int = 1
    """For OMP_NUM_THREADS."""
    cores: tuple[int, ...] = ()
    """The process is bound to these cores; none leaves it free."""


def places(slots: int, *, devices: Sequence[str] = (), pin: bool = False) -> list[Place]:
    """A place for each slot: the devices in turn, the cores in equal parts.

    Raises:
        ValueError: cores cannot be divided into so many parts.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // slots)
    if pin and len(cores) < slots:
        raise ValueError(f"{len(cores)} cores cannot be divided among {slots} processes")
    return [
        Place(
            devices[slot % len(devices)] if devices else None,
            share,
            tuple(cores[slot * share : (slot + 1) * share]) if pin else (),
        )
        for slot in range(slots)
    ]


Command = Callable[[Key, Assignment, Path, bool], list[str]]
"""``command(key, assignment, runs, resume)``: what a process runs. Its run folder is ``runs / key.name``."""


class TrialProcesses:
    """``folder``: of the study. ``grace``: seconds from SIGTERM to SIGKILL."""

    def __init__(self, folder: Path, command: Command, at: Sequence[Place], *, grace: float = 60.0) -> None:
        self._folder, self._command, self._places, self._grace = folder, command, at, grace
        self._running: dict[Key, subprocess.Popen] = {}
        for name in (LOGS, RUNS):
            (folder / name).mkdir(exist_ok=True)

    def start(self, key: Key, assignment: Assignment, slot: int) -> None:
        """Start a process under a guard. A run folder that is there is gone on with."""
        runs, place = self._folder / RUNS, self._places[slot]
        resume = (runs / key.name).exists()
        self._file(key, "exit").unlink(missing_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(place.threads), "PYTHONUNBUFFERED": "1"}
        if place.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place.device
        about = [self._file(key, "lock"), self._file(key, "exit"), self._grace, ",".join(map(str, place.cores))]
        words = [sys.executable, guard.__file__, *map(str, about), *self._command(key, assignment, runs, resume)]
        with self._file(key, "log").open("ab") as log:
            self._running[key] = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def stop(self, key: Key) -> None:
        """SIGTERM, and SIGKILL after the grace. The guard sees to both."""
        process = self._running.get(key)
        if process is not None and process.stdin is not None and not process.stdin.closed:
            process.stdin.close()

    def ended(self) -> list[Exit]:
        """What has ended since the last call."""
        gone = [key for key, process in self._running.items() if process.poll() is not None]
        return [self._reaped(key) for key in gone]

    def kill(self) -> None:
        """SIGKILL to all that run, without grace."""
        for key, process in list(self._running.items()):
            _kill_group(process.pid)
            process.wait(timeout=10)
            self._reaped(key)

    def recover(self, key: Key) -> Exit | None:
        """Wait until the guard of an earlier tuner has ended its process, and read what it wrote.

        Raises:
            TimeoutError: the guard is still there after twice the grace.
        """
        file = self._file(key, "lock")
        deadline = time.monotonic() + 2 * self._grace + 10
        while file.exists() and _is_held(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key.name} is still running, {2 * self._grace + 10:g} s after its tuner was gone")
            time.sleep(0.05)
        code = self._code(key)
        return None if code is None else Exit(key, code, last_lines(self._file(key, "log")))

    def _reaped(self, key: Key) -> Exit:
        process = self._running.pop(key)
        if process.stdin is not None:
            process.stdin.close()
        # The trial's own processes end with its guard; a guard that was killed leaves them.
        _kill_group(process.pid)
        code = self._code(key)
        return Exit(key, -signal.SIGKILL if code is None else code, last_lines(self._file(key, "log")))

    def _code(self, key: Key) -> int | None:
        file = self._file(key, "exit")
        return json.loads(file.read_text())["code"] if file.exists() else None

    def _file(self, key: Key, kind: str) -> Path:
        return self._folder / LOGS / f"{key.name}.{kind}"


def last_lines(log: Path) -> str:
    """The end of a log, in one line."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4000))
        text = stream.read().decode("utf-8", "replace")
    # A progress bar writes over its line.
    lines = [line.rpartition("\r")[2].strip() for line in text.split("\n")]
    return " | ".join([line for line in lines if line][-LAST_LINES:])


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_held(file: Path) -> bool:
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def training_command(trainer: str, words: Callable[[Assignment], list[str]], first_seed: int = 0) -> Command:
    """The command line of ``rl-fn train`` for a repetition. ``words``: of an assignment."""

    def command(key: Key, assignment: Assignment, runs: Path, resume: bool) -> list[str]:
        own: list[Any] = ["--seed", first_seed + key.seed, "--name", key.name, "--output", runs]
        made = [sys.executable, "-m", "rl_bridge.cli", "train", trainer, *words(assignment), *map(str, own)]
        return [*made, "--resume"] if resume else made

    return command
