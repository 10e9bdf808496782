"""Changes between two steps of a loop: what a checkpoint must hold, and the order of draws and updates."""

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from rl_bridge.engines.engine import Engine
from rl_bridge.run.run import Stateful

_numbers = itertools.count()
changed: "list[Part]" = []
"""Objects that changed since the run's step began; the run looks whether its checkpoints have them."""


def change(part: "Part") -> int:
    """Note that an object changed; the number of this event in the life of the process."""
    if not any(part is other for other in changed):
        changed.append(part)
    return next(_numbers)


def draw() -> int:
    """The number of a draw in the life of the process."""
    return next(_numbers)


class Part(Protocol):
    """An object that a run's checkpoints hold: the policy, the rows, whatever else changes from step to step."""

    kind: str
    """The name of the object in checkpoints and in the record."""

    def parts(self) -> Mapping[str, Engine | Stateful]:
        """Engines and states that a checkpoint saves, by name."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Numbers and texts that a resumed run must have again."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """Hashes of files that a resumed run must have again, by what the files are."""
        ...
