"""Verifiable rewards: the user's function over (completion, row), each reward checked."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_bridge.data.trajectory import Trajectory

Reward = Callable[[str, Mapping[str, Any]], float]


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, surrounding white space aside, else 0.

    >>> exact_match(" 95", {"answer": "95"}), exact_match("96", {"answer": "95"})
    (1.0, 0.0)
    """
    return float(completion.strip() == str(row["answer"]).strip())


def load_reward(source: str) -> Reward:
    """The function that ``FILE.py:function`` names; it is called with a completion's text and its row.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the source is not of that form, the file fails to load, or has no such function.
    """
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", source)
    if match is None:
        raise ValueError(f"a reward is named FILE.py:function, got {source!r}")
    path = Path(match[1])
    if not path.is_file():
        raise FileNotFoundError(f"no such reward file: {path}")
    spec = importlib.util.spec_from_file_location(f"rl_bridge_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, among others, look their own module up.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    function: Reward | None = getattr(module, match[2], None)
    if not callable(function):
        raise ValueError(f"{path} has no function {match[2]!r}")
    return function


def score(reward: Reward, trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The trajectories with the row that each came from (number ``group`` of ``rows``) and ``rewards["reward"]``.

    Raises:
        ValueError: a reward that raises or is not a finite number, with the place of its row.
    """
    scored = []
    for trajectory in trajectories:
        if not 0 <= trajectory.group < len(rows):
            raise ValueError(f"a trajectory of group {trajectory.group} has no row; there are {len(rows)}")
        completion, row = trajectory.completion, rows[trajectory.group]
        where = f"reward {getattr(reward, '__name__', 'function')} on {row.get('_where', 'a row')}"
        try:
            value = reward(completion, row)
        except Exception as error:
            raise ValueError(f"{where} raised {type(error).__name__}: {error}; completion {completion!r}") from error
        if isinstance(value, bool | int | float) and math.isfinite(value):
            scored.append(replace(trajectory, row=row, rewards={"reward": float(value)}))
        else:
            raise ValueError(f"{where} returned {value!r}, expected a finite number; completion {completion!r}")
    return scored
