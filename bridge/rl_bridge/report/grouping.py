"""Runs that differ in nothing but the seed belong together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_bridge.report.reading import RunFiles

OWN = (
    "name", "output", "resume", "resume_anyway", "seed", "threads", "checkpoint_every", "keep_checkpoints",
    "stop_after_skips", "samples_every", "samples_kept", "trackers", "tracker_output", "tracker_project",
    "system_every",
)  # fmt: skip
"""Options in which runs of one group may differ."""


@dataclass(frozen=True)
class Group:
    """``runs`` are places in the report's list of runs."""

    label: str
    runs: list[int]
    options: dict[str, str]


def options_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every option by its dotted name, as text.

    >>> options_of({"seed": 0, "policy": {"steps": 8, "pass_at": []}})
    {'seed': '0', 'policy.steps': '8', 'policy.pass_at': '[]'}
    """
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= options_of(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """The groups in the order of their first runs. A label says what tells a group from the others.

    An option that only one of two configs has, as of an older version, is no difference between them.
    """
    options = [options_of(run.config) for run in runs]
    keys = [{name: value for name, value in of_run.items() if name not in OWN} for of_run in options]
    members: list[list[int]] = []
    for place, key in enumerate(keys):
        same = next((group for group in members if _agree(keys[group[0]], key)), None)
        if same is None:
            members.append([place])
        else:
            same.append(place)
    differing = differences([keys[group[0]] for group in members])
    return [Group(_label(runs, keys, group, differing), group, options[group[0]]) for group in members]


def differences(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the options that are not the same in all of them."""
    names = dict.fromkeys(name for of_one in options for name in of_one)
    return [name for name in names if len({of_one.get(name) for of_one in options}) > 1]


def _agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _label(
    runs: Sequence[RunFiles], keys: Sequence[Mapping[str, str]], group: Sequence[int], differing: Sequence[str]
) -> str:
    names = ", ".join(runs[place].name for place in group)
    told = [f"{name} {keys[group[0]].get(name, '–')}" for name in differing[:3]]
    told += [f"and {len(differing) - 3} more"] if len(differing) > 3 else []
    return f"{names}: {', '.join(told)}" if told else names
