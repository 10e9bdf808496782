"""What a test sees of exporters at work: their processes and the rows that they sent."""

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil

ALL = ("tensorboard", "wandb", "mlflow", "trackio")


def wait_for(what, condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return found


def rows_sent(folder: Path) -> dict[str, int]:
    states = {file.name.split("-")[0]: file.read_text() for file in (folder / "exports").glob("*-*.json")}
    return {name: json.loads(state)["tails"]["metrics"]["rows"] for name, state in states.items()}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Exporters and samplers of a run, and what they started, who live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and any("rl_tools.export" in word for word in words):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                found += [process, *process.children(recursive=True)]
    return [process for process in found if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return False
