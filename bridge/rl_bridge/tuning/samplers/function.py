"""A user's function that proposes: ``module:function`` or ``FILE.py:function``."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from rl_bridge.tuning.samplers.protocol import Result
from rl_bridge.tuning.space import Assignment, Value
from rl_bridge.user_files import load_file

Propose = Callable[[int, list[dict[str, Any]]], Mapping[str, Value] | None]
"""``propose(number, told)``: options and values of trial ``number``, or None at the end.

``told``: of each earlier trial that ended, in the order of their ends, ``{"trial", "assignment", "status", "losses",
"violations"}``. A function whose result depends on nothing else makes a study that can go on after a kill.
"""


class FunctionSampler:
    """``check`` looks at every proposal: the trainer's own options."""

    def __init__(self, propose: Propose, check: Callable[[Mapping[str, Value]], None] = lambda _: None) -> None:
        self._propose, self._check = propose, check
        self._told: list[dict[str, Any]] = []

    def ask(self, number: int) -> Assignment | None:
        """What the function proposes.

        Raises:
            TypeError: neither a mapping nor None.
        """
        proposed = self._propose(number, [dict(told) for told in self._told])
        if proposed is None:
            return None
        if not isinstance(proposed, Mapping):
            raise TypeError(f"a function that proposes returns a mapping or None, got {type(proposed).__name__}")
        values = {name.replace("_", "-"): value for name, value in proposed.items()}
        self._check(values)
        return values

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Remembered for the next call."""
        about = {"status": result.status, "losses": result.losses, "violations": result.violations}
        self._told.append({"trial": number, "assignment": dict(assignment), **about})


def load_function(place: str) -> Propose:
    """The function that ``place`` names.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, name = place.rpartition(":")
    if not module or not name:
        raise ValueError(f"a function that proposes is named module:function or FILE.py:function, got {place!r}")
    try:
        holder = load_file(Path(module), "proposal") if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {module}: {error}") from error
    found: Any = getattr(holder, name, None)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    return cast(Propose, found)
