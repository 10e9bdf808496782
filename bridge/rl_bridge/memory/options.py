"""A run's options back from its config.json."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_bridge.pipelines.losses import LOSSES, REWARD_MODEL_LOSSES
from rl_bridge.pipelines.objective import ALGORITHMS
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.pipelines.preference import PreferencePipeline
from rl_bridge.pipelines.reward_model import RewardModelPipeline
from rl_bridge.pipelines.sft import SFTPipeline
from rl_bridge.recipes import quickstart

_KINDS = {
    "policy": quickstart,
    "reward_model": RewardModelPipeline,
    "preference": PreferencePipeline,
    "sft": SFTPipeline,  # a policy's run has options of that name too, for its warm start
}
"""How a trainer's default options are made, by the name that its config.json has its own options under."""


def pipeline_of(path: Path) -> PolicyPipeline | RewardModelPipeline | PreferencePipeline | SFTPipeline:
    """The pipeline that a run's folder or its config.json describes.

    Raises:
        ValueError: the file is of no training.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no run's config.json: {error}") from error
    kind = next((name for name in _KINDS if isinstance(data, dict) and isinstance(data.get(name), dict)), None)
    if kind is None:
        raise ValueError(f"{file} is not of rl-fn train: it has none of {', '.join(_KINDS)}")
    return like(_KINDS[kind](), data)


def like(default: Any, data: Mapping[str, Any]) -> Any:
    """``default`` with the values of ``data``, in the types that ``default`` has. Options that are not there stay.

    Raises:
        ValueError: an option that there is none of, or an algorithm of that name.
    """
    names = {option.name for option in dataclasses.fields(default)}
    if "algorithm" in names and data.get("algorithm", default.algorithm) != default.algorithm:
        if data["algorithm"] not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {data['algorithm']!r}; there is: {', '.join(sorted(ALGORITHMS))}")
        default = ALGORITHMS[data["algorithm"]]()
    if "loss" in names and isinstance(data.get("loss"), str) and data["loss"] != default.loss:
        losses = LOSSES | REWARD_MODEL_LOSSES
        if data["loss"] not in losses:
            raise ValueError(f"unknown loss {data['loss']!r}; there is: {', '.join(sorted(losses))}")
        default = losses[data["loss"]]()
    options = dataclasses.fields(default)
    if unknown := sorted(set(data) - {option.name for option in options}):
        raise ValueError(f"{type(default).__name__} has no option {', '.join(unknown)}")
    settable = {option.name for option in options if option.init}
    values = {name: _value(getattr(default, name), value) for name, value in data.items() if name in settable}
    return dataclasses.replace(default, **values)


def _value(default: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        return like(default, value)
    if isinstance(default, Path):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
