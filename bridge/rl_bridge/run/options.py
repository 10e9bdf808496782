"""The options of a long run, which every pipeline shares."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.scalars import FLOAT32

MAY_CHANGE: dict[str, Any] = {"resume": "may change"}
"""``field(metadata=MAY_CHANGE)``: a resumed run may have another value of the option without a word."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Programs that a run's record can go to."""
OBSERVED = ("trackers", "system_every", "memory")
"""Options that observers read, and the run itself does not."""

STEPS = 10**9
"""Steps of a run at most: of a tenth of a second each they take three years."""
WHOLE = 2**63 - 1
"""The largest count or position, which has 64 bits."""


def require_finite(options: Any) -> None:
    """Refuse numbers that are NaN, infinite, or larger than 64 bits hold: in tuples and in the options of a part, too.

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


def require_name(name: str, output: Path) -> None:
    """Refuse a name of a folder in ``output`` that is a path, hidden, or cannot be read.

    Raises:
        ValueError: with both.
    """
    plain = name == name.strip() and name.isprintable() and not name.startswith(".")
    if not plain or re.fullmatch(r"[^/\\]{1,200}", name) is None:
        raise ValueError(
            f"name is that of a folder in {output}, not a path and not hidden, of characters that can be printed and "
            f"without spaces at its ends, got {name!r}"
        )


def require_output(output: Path, *, writable: bool = False) -> None:
    """Refuse a folder of runs that is a file or lies under one; with ``writable``, one that this user cannot write to.

    Raises:
        ValueError: with the path, as --output.
    """
    place = next(place for place in (output, *output.absolute().parents) if place.exists())
    if not place.is_dir():
        where = "is a file" if place == output else f"lies under the file {place}"
        raise ValueError(f"--output {output} {where}; give a folder")
    if writable and not os.access(place, os.W_OK):
        raise ValueError(f"--output {output}: {place} cannot be written to; give a folder that can be")


def require_used(options: Any, names: Sequence[str], without: str, *, part: str = "", begun: Any = None) -> None:
    """Refuse options that nothing would read, unless they have their default values, or those of ``begun``.

    ``without``: the words of the message that say why nothing reads them. ``part``: their place in a run's options.

    Raises:
        ValueError: with the option's name on the command line, its value and ``without``.
    """
    for option in fields(options):
        if option.name in names:
            value = getattr(options, option.name)
            default = option.default if option.default_factory is MISSING else option.default_factory()
            default = default if begun is None else getattr(begun, option.name)
            if value != default:
                full = f"{part}.{option.name}" if part else option.name
                if is_dataclass(value):  # The message has the first option of the part that was given.
                    inner = [inside.name for inside in fields(value)]
                    changed = [name for name in inner if getattr(value, name) != getattr(default, name, None)]
                    if changed:
                        full, value = f"{full}.{changed[0]}", getattr(value, changed[0])
                raise ValueError(f"--{full.replace('_', '-')} {shown(value)} has no effect {without}")


def in_vain(options: "RunOptions", begun: "RunOptions") -> Iterator[str]:
    """Messages about options that nothing reads beside the others, and that ``begun`` has other values of.

    ``begun``: the options that a command begins with.
    """
    for place, without in options.unread().items():
        part, _, name = place.rpartition(".")
        holder, before = (attrgetter(part)(each) if part else each for each in (options, begun))
        try:
            require_used(holder, (name,), without, part=part, begun=before)
        except ValueError as error:
            yield str(error)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every run: its folder, its checkpoints, its observers."""

    trainer: ClassVar[str] = ""
    """The name of the options' trainer on the command line and in run.toml, where there is one."""
    name: str = field(default="run", metadata=MAY_CHANGE)
    """Name of the run's folder. A name that is taken gets a number behind it."""
    output: Path = field(default=Path("runs"), metadata=MAY_CHANGE)
    """The folder of all runs."""
    resume: bool = field(default=False, metadata=MAY_CHANGE)
    """Go on from the newest whole checkpoint of the run of this name."""
    resume_anyway: bool = field(default=False, metadata=MAY_CHANGE)
    """Resume with other options, data or rewards than the checkpoint was made with, and without damaged records."""
    dry_run: bool = field(default=False, metadata=MAY_CHANGE)
    """Print all options, check rows, model, reward and memory, and end before anything is written."""
    checkpoint_every: int = field(default=50, metadata=MAY_CHANGE)
    """Steps from one checkpoint to the next."""
    keep_checkpoints: int = field(default=2, metadata=MAY_CHANGE)
    """Number of the newest checkpoints that stay. The best one stays besides."""
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
        check_options(self)
        require_finite(self)
        require_name(self.name, self.output)
        require_output(self.output)
        for option in ("checkpoint_every", "keep_checkpoints", "stop_after_skips"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1, got {getattr(self, option)}")
        if self.dry_run and self.resumed is not None:
            raise ValueError(
                "--dry-run ends before a run's folder, and --resume takes one up: what a checkpoint was made with is "
                "compared by --resume alone, before the first step"
            )
        if self.system_every < 0:
            raise ValueError(f"system_every must not be negative, got {self.system_every}")
        for tracker in self.tracker_names():
            if tracker not in TRACKERS:
                raise ValueError(f"trackers are {', '.join(TRACKERS)}, got {tracker!r}")
        if not self.tracker_names():
            require_used(self, ("tracker_output", "tracker_project"), "without --trackers")

    def unread(self) -> dict[str, str]:
        """Option → why nothing reads it beside the others: of options that some command gives a value of its own.

        A command remarks on other values than its own, which may have come from a run file or a study before the
        option that they need was taken back. Options whose default is of their class are refused when they are made.
        """
        return {}

    def tracker_names(self) -> list[str]:
        """The names in ``trackers``, each once; a comma separates as a space does."""
        return list(dict.fromkeys(name for words in self.trackers for name in words.split(",") if name))

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to resume; None: this is a new run."""
        return self.output.absolute() / self.name if self.resume or self.resume_anyway else None

    def folder(self) -> Path:
        """The folder of the run to resume; else a new one, made here.

        A new folder is ``output/name``, or the first of ``name-2``, ``name-3``, … that does not exist. Runs that start
        at one moment get a folder each. The path is absolute: a later change of the working directory moves nothing.
        """
        if self.resumed is not None:
            return self.resumed
        folder, number = self.output.absolute() / self.name, 1
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
                folder = folder.with_name(f"{self.name}-{number}")
