"""A run's options back from its config.json."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_bridge.pipelines.objective import ALGORITHMS
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.recipes import quickstart


def pipeline_of(path: Path) -> PolicyPipeline:
    """The pipeline that a run's folder or its config.json describes.

    Raises:
        ValueError: the file is none of a policy's training.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no run's config.json: {error}") from error
    if not isinstance(data, dict) or "policy" not in data or "objective" not in data:
        raise ValueError(f"{file} is not of rl-fn train policy: it has no policy and objective")
    return like(quickstart(), data)


def like(default: Any, data: Mapping[str, Any]) -> Any:
    """``default`` with the values of ``data``, in the types that ``default`` has. Options that are not there stay.

    Raises:
        ValueError: an option that there is none of, or an algorithm of that name.
    """
    names = {option.name for option in dataclasses.fields(default)}
    if unknown := sorted(set(data) - names):
        raise ValueError(f"{type(default).__name__} has no option {', '.join(unknown)}")
    if "algorithm" in names and data.get("algorithm", default.algorithm) != default.algorithm:
        if data["algorithm"] not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {data['algorithm']!r}; there is: {', '.join(sorted(ALGORITHMS))}")
        default = ALGORITHMS[data["algorithm"]]()
    settable = {option.name for option in dataclasses.fields(default) if option.init}
    values = {name: _value(getattr(default, name), value) for name, value in data.items() if name in settable}
    return dataclasses.replace(default, **values)


def _value(default: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        return like(default, value)
    if isinstance(default, Path):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
