"""Events of a step of a loop: changes, which a checkpoint must hold, scores, evaluations, draws in order."""

import hashlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines.engine import Engine
from rl_bridge.run.run import Stateful

_numbers = itertools.count()
changed: "list[Part]" = []
"""Objects that changed since the run's step began; the run looks whether its checkpoints have them."""
scorers: "list[Part]" = []
"""Models that scored since the run's step began; the run compares those in none of its checkpoints at a resume."""
evaluations: deque[Mapping[str, Any]] = deque(maxlen=64)  # a loop without a run never looks
"""Settings that decided held-out numbers since the run's step began, which a resumed run compares as well."""


def change(part: "Part") -> int:
    """Note that an object changed; the number of this event in the life of the process."""
    _add(part, changed)
    return next(_numbers)


def note_scorer(part: "Part") -> None:
    """Note that a frozen model scored what an update reads."""
    _add(part, scorers)


def note_evaluation(trajectories: Sequence[Trajectory], settings: Mapping[str, Any]) -> None:
    """Note that held-out numbers were made of completions, with the ``settings`` that decided these."""
    prompts = [[*one.prompt_tokens] for one in trajectories]
    evaluations.append({**settings, "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]})


def _add(part: "Part", parts: "list[Part]") -> None:
    if not any(part is other for other in parts):
        parts.append(part)


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
