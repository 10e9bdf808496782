"""Events of a step of a loop: changes, which a checkpoint must hold, scores, evaluations, draws in order."""

import hashlib
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines.engine import Engine
from rl_bridge.run.run import Stateful

_numbers = itertools.count()
changed: "list[Part]" = []
"""Objects that changed since the run's step began; the run looks whether its checkpoints have them."""
noted: "deque[tuple[str, Callable[[], Mapping[str, Any]]]]" = deque(maxlen=64)  # a loop without a run never looks
"""Frozen models that scored since the run's step began, and evaluations, by kind: the settings of each."""


def change(part: "Part") -> int:
    """Note that an object changed; the number of this event in the life of the process."""
    if not any(part is other for other in changed):
        changed.append(part)
    return next(_numbers)


def note_scorer(kind: str, settings: Callable[[], Mapping[str, Any]]) -> None:
    """Note that a frozen model scored what an update reads."""
    noted.append((kind, settings))


def note_evaluation(trajectories: Sequence[Trajectory], settings: Mapping[str, Any]) -> None:
    """Note that held-out numbers were made of completions, with the ``settings`` that decided these."""
    rows = {one.group: [one.row.get(key) for key in ("prompt", "messages", "answer")] for one in trajectories}
    text = json.dumps(rows, default=lambda value: type(value).__name__)
    own = {**settings, "prompts": hashlib.sha256(text.encode()).hexdigest()[:16]}
    noted.append(("evaluation", lambda: own))


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


def names_of(state: Sequence[Part]) -> list[str]:
    """The name of each object: its kind, with a number behind the second of a kind.

    >>> from types import SimpleNamespace
    >>> names_of([SimpleNamespace(kind=kind) for kind in ("policy", "rows", "policy")])
    ['policy', 'rows', 'policy-2']
    """
    seen_kinds: Counter[str] = Counter()
    names = []
    for part in state:
        seen_kinds[part.kind] += 1
        names.append(part.kind if seen_kinds[part.kind] == 1 else f"{part.kind}-{seen_kinds[part.kind]}")
    return names
