"""The record of a run read again, and written for another program: TensorBoard, Weights & Biases."""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_bridge.tracking.events import EventLog
from rl_bridge.tracking.records import METRICS, read_records

Target = Literal["tensorboard", "wandb"]
_ABOUT = ("stage", "step", "run", "attempt", "time")
"""What of a record is no metric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is exported and where to. The same export again takes the place of the first."""

    to: Target
    output: Path = Path("exported")
    """A folder for event files, or for the files of Weights & Biases."""
    project: str = "rl-fn"
    """The project, where the other program has projects."""


class Writer(Protocol):
    """What takes the metrics of record ``number``; ``time`` is in seconds since 1970."""

    def __call__(self, number: int, metrics: dict[str, float], time: float) -> None: ...


def export(folder: Path, options: ExportOptions) -> int:
    """Write every step of the run in ``folder``; returns how many there were.

    Raises:
        ValueError: there is no run, or a record is damaged.
        ModuleNotFoundError: the other program is not installed.
    """
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS}: it is not a run's folder")
    records = read_records(file)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    # The same for one folder and another for every other, whatever their names.
    key = f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    with _WRITERS[options.to](options, folder.name, key, config) as write:
        for number, record in enumerate(records):
            metrics = {
                f"{record['stage']}/{name}": float(value)
                for name, value in record.items()
                if name not in _ABOUT and isinstance(value, int | float)
            }
            write(number, metrics, record["time"])
    return len(records)


@contextmanager
def _tensorboard(options: ExportOptions, name: str, key: str, config: dict[str, Any]) -> Iterator[Writer]:
    target = options.output / key
    for old in target.glob("events.out.tfevents.*"):
        old.unlink()
    log = EventLog(target, purge_step=None)
    try:
        yield log.write_metrics
    finally:
        log.close()


@contextmanager
def _wandb(options: ExportOptions, name: str, key: str, config: dict[str, Any]) -> Iterator[Writer]:
    try:
        wandb: Any = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: pip install 'rl-fn[wandb]'") from error
    options.output.mkdir(parents=True, exist_ok=True)
    # WANDB_MODE=offline, which is the library's own switch, writes to the folder alone.
    run = wandb.init(
        project=options.project,
        id=key,
        name=name,
        config=config,
        dir=str(options.output),
        resume="allow",
        reinit="create_new",
    )
    with run:
        yield lambda number, metrics, time: run.log({**metrics, "time": time}, step=number)


_WRITERS: dict[Target, Any] = {"tensorboard": _tensorboard, "wandb": _wandb}
