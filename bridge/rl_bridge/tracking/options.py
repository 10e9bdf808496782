"""The options of a long run, which every pipeline shares."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def __post_init__(self) -> None:
        """Refuse a name that leaves ``output``, and counts below 1."""
        if re.fullmatch(r"[^/\\\x00-\x1f]{1,200}", self.name) is None or self.name.startswith("."):
            raise ValueError(f"name is that of a folder in {self.output}, not a path and not hidden, got {self.name!r}")
        for option in ("checkpoint_every", "keep_checkpoints", "stop_after_skips"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1, got {getattr(self, option)}")

    def folder(self) -> Path:
        """Of the run to resume; else ``output/name``, or the first of ``name-2``, ``name-3``, … that does not exist."""
        folder, number = self.output / self.name, 1
        while folder.exists() and not (self.resume or self.resume_anyway):
            number += 1
            folder = self.output / f"{self.name}-{number}"
        return folder
