"""Starts jobs, of torchrun or of one driver, and finds the processes that they leave behind."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

MARK = "RL_BRIDGE_JOB"
ROOT = Path(__file__).parents[2]


def start(workers: int, *command: str, mark: str, torchrun: bool = True, **environment: str) -> subprocess.Popen:
    """A job whose processes all have ``mark`` in their environment."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={workers}", "--no-python", sys.executable]
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, *(launcher if torchrun else []), *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark} | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(workers: int, *command: str, timeout: float = 120, **options) -> tuple[int, str, list[str]]:
    """Exit code, output, and the processes that are left when the job has ended."""
    mark = uuid.uuid4().hex
    job = start(workers, *command, mark=mark, **options)
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.kill()
        output, _ = job.communicate(timeout=30)
        output = f"{output}\nthe job did not end in {timeout:g} s"
    left = orphans(mark)
    return job.returncode, output, left


def orphans(mark: str, patience: float = 20.0) -> list[str]:
    """Processes with ``mark`` that have not ended within ``patience`` seconds; they are killed."""
    end = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    described = []
    for process in found:
        try:
            described.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
        except psutil.Error:
            continue
    return described


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that have ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
