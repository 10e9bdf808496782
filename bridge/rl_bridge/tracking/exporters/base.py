"""What an exporter is: one run in the store of one library."""

import enum
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_bridge.tracking.exporters.rows import Row
from rl_bridge.tracking.options import TRACKERS


class GoesOn(enum.Enum):
    """When a new process may add to what another one sent. Otherwise all of the run is taken back and sent again."""

    ALWAYS = "always"
    """Sending a row twice changes nothing."""
    AFTER_CLOSE = "after close"
    """The other process must have closed the store: nobody knows what a killed one had sent."""
    NEVER = "never"
    """The store is one file that one process writes: it is left alone until there is something new."""


@dataclass(frozen=True)
class About:
    """What is exported of a run besides its rows; scrubbed."""

    key: str
    """The same for one run's folder and another for every other, whatever their names."""
    name: str
    config: Mapping[str, Any]
    provenance: Sequence[Mapping[str, Any]]
    """An entry an attempt: command, git, data, versions, environment."""

    def options(self) -> dict[str, Any]:
        """The config with dotted names, and a list as its text.

        >>> About("k", "n", {"policy": {"steps": 3}, "tags": ["a"]}, []).options()
        {'policy.steps': 3, 'tags': "['a']"}
        """
        return dict(_flat(self.config, ""))


@dataclass(frozen=True)
class Place:
    """Where a library's store is."""

    output: Path
    """A folder for local stores, whole."""
    project: str


@dataclass(frozen=True)
class Artifact:
    """A model that the run made. ``sha256`` is of its files' names and checksums."""

    folder: Path
    version: int | None
    """Of the weights: how many updates made them."""
    sha256: str
    files: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """path, bytes, sha256 of each."""
    copied: bool = False
    """Whether the store gets the files too, and not their names and checksums alone."""

    def manifest(self) -> dict[str, Any]:
        """As JSON."""
        return {"version": self.version, "sha256": self.sha256, "files": [dict(file) for file in self.files]}


class Exporter(Protocol):
    """Made with (about, place, memory): ``memory`` is a dict of JSON that the next exporter of this run gets back.

    Calls come in this order: ``clear`` where it is needed, ``open``, any number of ``send`` and ``artifact``, and
    ``close``, after an error too.
    """

    goes_on: GoesOn

    def has(self, rows: int) -> bool:
        """Whether the store still has the run, with at least this many rows of its metrics where it can tell."""
        ...

    def clear(self) -> None:
        """Take back everything of this run; nothing happens if there is nothing."""
        ...

    def open(self) -> None:
        """Be ready for rows; config and provenance are in the store."""
        ...

    def send(self, rows: Sequence[Row]) -> None:
        """Rows of one stream; on return they are the library's own responsibility, or in the store."""
        ...

    def artifact(self, artifact: Artifact) -> None:
        """The run's model."""
        ...

    def close(self, ended: bool) -> None:
        """Everything is in the store. ``ended``: the run came to its end."""
        ...


def exporter_of(name: str) -> type[Any]:
    """The class of an exporter, with nothing of its library loaded."""
    assert name in TRACKERS, name
    return importlib.import_module(f"rl_bridge.tracking.exporters.{name}").RunExporter


def library(name: str) -> Any:
    """Import a library, or part of one, when it is needed.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name or name} is not installed: pip install '.[trackers]'") from error


def _flat(value: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, part in value.items():
        if isinstance(part, Mapping):
            found += _flat(part, f"{prefix}{name}.")
        else:
            found.append((prefix + name, part if isinstance(part, str | int | float | None) else str(part)))
    return found
