"""The options of a long run, which every pipeline shares."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

MAY_CHANGE: dict[str, Any] = {"resume": "may change"}
"""``field(metadata=MAY_CHANGE)``: a resumed run may have another value of the option without a word."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Programs that a run's record can go to."""
OBSERVED = ("trackers", "system_every", "memory")
"""Options that observers read, and the run itself does not."""

FLOAT32 = 3.4028234663852886e38
"""What is computed with is float32: a larger number would be infinite."""


WHOLE = 2**63 - 1
"""What counts and positions are held in has 64 bits."""


def require_finite(options: Any) -> None:
    """Refuse options that are not a number, infinite, or more than 64 bits hold, wherever they stand: in tuples, in the
    options of a part.

    Raises:
        ValueError: with the option's name on the command line and its value.
    """
    for name, value in _numbers(options, "", float):
        if not abs(value) <= FLOAT32:
            what = "a number" if math.isnan(value) else f"a finite number up to {FLOAT32:.4g}"
            raise ValueError(f"--{name.replace('_', '-')} must be {what}, got {value}")
    for name, value in _numbers(options, "", int):
        if not -WHOLE - 1 <= value <= WHOLE:
            raise ValueError(f"--{name.replace('_', '-')} must be a whole number up to {WHOLE}, got {value}")


def _numbers(value: Any, name: str, kind: type) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        for option in fields(value):
            yield from _numbers(getattr(value, option.name), f"{name}.{option.name}" if name else option.name, kind)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}", kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name, kind)
    elif isinstance(value, kind):
        yield name, value


def require_used(options: Any, names: Sequence[str], without: str, *, part: str = "") -> None:
    """Refuse options that nothing would read, unless they have their default values.

    ``without``: what is lacking, or is given and takes their place. ``part``: where the options stand in a run's.

    Raises:
        ValueError: with the option's name on the command line, its value and ``without``.
    """
    for option in fields(options):
        if option.name in names:
            value = getattr(options, option.name)
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if value != default:
                full = f"{part}.{option.name}" if part else option.name
                if is_dataclass(value):  # a part: of its options, the first that was given
                    inner = [inside.name for inside in fields(value)]
                    changed = (name for name in inner if getattr(value, name) != getattr(default, name, None))
                    for name in changed:
                        full, value = f"{full}.{name}", getattr(value, name)
                        break
                raise ValueError(f"--{full.replace('_', '-')} {shown(value)} has no effect {without}")


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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
        """Refuse numbers that are none, a name that leaves ``output``, counts below 1, and unknown trackers."""
        require_finite(self)
        plain = self.name == self.name.strip() and self.name.isprintable() and not self.name.startswith(".")
        if not plain or re.fullmatch(r"[^/\\]{1,200}", self.name) is None:
            raise ValueError(
                f"name is that of a folder in {self.output}, not a path and not hidden, of characters that can be "
                f"printed and without spaces at its ends, got {self.name!r}"
            )
        for option in ("checkpoint_every", "keep_checkpoints", "stop_after_skips"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1, got {getattr(self, option)}")

        if self.system_every < 0:
            raise ValueError(f"system_every must not be negative, got {self.system_every}")
        for tracker in self.tracker_names():
            if tracker not in TRACKERS:
                raise ValueError(f"trackers are {', '.join(TRACKERS)}, got {tracker!r}")
        if not self.tracker_names():
            require_used(self, ("tracker_output", "tracker_project"), "without --trackers")

    def tracker_names(self) -> list[str]:
        """Of ``trackers``, each once; a comma separates as a space does."""
        return list(dict.fromkeys(name for words in self.trackers for name in words.split(",") if name))

    def folder(self) -> Path:
        """Of the run to resume; else made here: ``output/name``, or the first of ``name-2``, ``name-3``, … that can be.

        Of several starts at one moment each gets its own. It is absolute: who changes the working directory later moves
        nothing.
        """
        folder, number = self.output.absolute() / self.name, 1
        if self.resume or self.resume_anyway:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
                folder = folder.with_name(f"{self.name}-{number}")
