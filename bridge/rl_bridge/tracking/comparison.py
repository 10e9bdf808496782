"""What two configs differ in, by the names of the options."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rl_bridge.tracking.options import MAY_CHANGE

_ABSENT = "no such option"


def options_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every option of a config by its dotted name, as JSON has its value; without options that may change.

    >>> from rl_bridge.trainers.modules.optimizer import OptimizerConfig
    >>> options_of(OptimizerConfig(learning_rate=0.1))["learning_rate"]
    0.1
    """
    found: dict[str, Any] = {}
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.metadata.get("resume") == MAY_CHANGE["resume"]:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= options_of(value, f"{prefix}{option.name}.")
        else:
            found[prefix + option.name] = json.loads(json.dumps(value, default=str))
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each name whose values differ, in the order of ``now``.

    >>> differences({"policy.steps": 8, "seed": 0}, {"policy.steps": 9, "seed": 0})
    ['--policy.steps was 8 and is 9']
    """
    names = [*now, *(name for name in before if name not in now)]
    pairs = [(name, before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names]
    # As text: NaN differs from itself, and 1 equals True.
    return [
        f"--{name.replace('_', '-')} was {_text(old)} and is {_text(new)}"
        for name, old, new in pairs
        if _text(old) != _text(new)
    ]


def _text(value: Any) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False, sort_keys=True)
