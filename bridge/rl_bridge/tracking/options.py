"""The options of a long run, which every pipeline shares."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.tracking.exporters.live import LiveExport

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
MAY_CHANGE: dict[str, Any] = {"resume": "may change"}
"""``field(metadata=MAY_CHANGE)``: a resumed run may have another value of the option without a word."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run lies, and how its checkpoints are made."""

    name: str = field(default="run", metadata=MAY_CHANGE)
    """Of the run's folder. A name that is taken gets a number behind it."""
    output: Path = field(default=Path("runs"), metadata=MAY_CHANGE)
    """The folder of all runs."""
    resume: bool = field(default=False, metadata=MAY_CHANGE)
    """Go on from the newest whole checkpoint of the run of this name."""
    resume_anyway: bool = field(default=False, metadata=MAY_CHANGE)
    """Resume with other options, data or rewards than the checkpoint was made with, and without damaged records."""
    checkpoint_every: int = field(default=50, metadata=MAY_CHANGE)
    """Steps from one checkpoint to the next."""
    keep_checkpoints: int = field(default=2, metadata=MAY_CHANGE)
    """How many of the newest stay. The best one stays besides."""
    stop_after_skips: int = field(default=3, metadata=MAY_CHANGE)
    """Steps in a row with a loss or gradient that is not finite after which the run stops."""

    trackers: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    """Programs that get the metrics while the run goes on: tensorboard, wandb, mlflow, trackio."""
    tracker_output: Path = field(default=Path("exported"), metadata=MAY_CHANGE)
    """The folder of the trackers' local stores."""
    tracker_project: str = field(default="rl-fn", metadata=MAY_CHANGE)
    """The trackers' project; the experiment in MLflow."""
    system_every: float = field(default=0.0, metadata=MAY_CHANGE)
    """Seconds between two lines of system.jsonl: CPU, memory and GPUs. 0: there is no such file."""
    memory: bool = field(default=False, metadata=MAY_CHANGE)
    """Profile memory: memory.jsonl and memory.png in the run's folder, and a warning where it leaks. Slower."""

    def __post_init__(self) -> None:
        """Refuse a name that leaves ``output``, counts below 1, and trackers that there are not."""
        if re.fullmatch(r"[^/\\\x00-\x1f]{1,200}", self.name) is None or self.name.startswith("."):
            raise ValueError(f"name is that of a folder in {self.output}, not a path and not hidden, got {self.name!r}")
        for option in ("checkpoint_every", "keep_checkpoints", "stop_after_skips"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1, got {getattr(self, option)}")

        if self.system_every < 0:
            raise ValueError(f"system_every must not be negative, got {self.system_every}")
        for tracker in self.tracker_names():
            if tracker not in TRACKERS:
                raise ValueError(f"trackers are {', '.join(TRACKERS)}, got {tracker!r}")

    def tracker_names(self) -> list[str]:
        """Of ``trackers``, each once; a comma separates as a space does."""
        return list(dict.fromkeys(name for words in self.trackers for name in words.split(",") if name))

    def live_export(self) -> "LiveExport":
        """What runs beside the steps.

        Raises:
            ModuleNotFoundError: a tracker is not installed.
        """
        from rl_bridge.tracking.exporters.live import live_export

        return live_export(self.tracker_names(), self.tracker_output, self.tracker_project, self.system_every)

    def folder(self) -> Path:
        """Of the run to resume; else ``output/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
        folder, number = self.output / self.name, 1
        while folder.exists() and not (self.resume or self.resume_anyway):
            number += 1
            folder = self.output / f"{self.name}-{number}"
        return folder
