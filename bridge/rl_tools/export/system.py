"""Samples of the machine while a run goes on: a process of its own appends a line every few seconds to system.jsonl."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rl_bridge.common.append_log import AppendLog

SYSTEM = "system.jsonl"
_GPU = ("utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu")
_GPU_NAMES = ("percent", "memory_mib", "memory_total_mib", "watts", "celsius")
LIMIT = 5.0
"""Seconds for nvidia-smi's reply."""


class Sampler:
    """Samples one process with its children, and the machine."""

    def __init__(self, process: int) -> None:
        """``process``: the id of the run's process."""
        self._process = psutil.Process(process)
        self._gpus = True
        self._seen: dict[int, float] = {}
        self._at = time.monotonic()
        psutil.cpu_percent(None)
        self._cpu_seconds()

    def sample(self) -> dict[str, float]:
        """Percent of the machine's CPU, cores that the run used since the last sample, bytes, and GPUs where there are.

        Raises:
            psutil.NoSuchProcess: the run's process has ended.
        """
        machine = psutil.virtual_memory()
        before, self._at = self._at, time.monotonic()
        seconds, resident = self._cpu_seconds()
        numbers = {
            "cpu_percent": psutil.cpu_percent(None),
            "run_cores": seconds / max(self._at - before, 1e-3),
            "run_memory_bytes": float(resident),
            "memory_used_bytes": float(machine.total - machine.available),
            "memory_percent": machine.percent,
        }
        return numbers | (self._gpu() if self._gpus else {})

    def _cpu_seconds(self) -> tuple[float, int]:
        """(CPU seconds since the last call, bytes) of the process and its children, not of this one and its guard."""
        now: dict[int, float] = {}
        resident = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:
                if process == self._process:
                    raise
                continue
            if process.pid not in (os.getpid(), os.getppid()):
                now[process.pid] = times.user + times.system
                resident += memory.rss
        before, self._seen = self._seen, now
        return sum(value - before.get(pid, 0.0) for pid, value in now.items()), resident

    def _gpu(self) -> dict[str, float]:
        try:
            done = subprocess.run(
                ["nvidia-smi", f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=True,
            )
        except (FileNotFoundError, subprocess.SubprocessError):
            # No GPU, or no reply: the rest of the sample is worth having.
            self._gpus = False
            return {}
        return gpu_numbers(done.stdout)


def gpu_numbers(text: str) -> dict[str, float]:
    """nvidia-smi's lines, one a GPU, as numbers by name; fields without a number are left out.

    >>> gpu_numbers("93, 1024, 81559, 310.25, [N/A]")
    {'gpu0_percent': 93.0, 'gpu0_memory_mib': 1024.0, 'gpu0_memory_total_mib': 81559.0, 'gpu0_watts': 310.25}
    """
    numbers: dict[str, float] = {}
    for number, line in enumerate(text.strip().splitlines()):
        for name, word in zip(_GPU_NAMES, line.split(","), strict=True):
            if word.strip().replace(".", "", 1).isdigit():
                numbers[f"gpu{number}_{name}"] = float(word)
    return numbers


def main(words: list[str]) -> int:
    """``python -m rl_tools.export.system PROCESS FOLDER SECONDS``: sample until the process or this one is ended."""
    process, folder, every = int(words[0]), Path(words[1]), float(words[2])
    with AppendLog(folder / SYSTEM) as log:
        try:
            sampler = Sampler(process)
            while True:
                time.sleep(every)
                line: dict[str, Any] = {"time": round(time.time(), 3), **sampler.sample()}
                log.append(line)
        except psutil.NoSuchProcess:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
