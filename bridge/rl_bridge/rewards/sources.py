"""Rewards from what the command line or a program names."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.asking import Asked
from rl_bridge.rewards.environment import EnvironmentReward
from rl_bridge.rewards.http import Server
from rl_bridge.rewards.judge import Judge, RemoteRewardModel
from rl_bridge.rewards.loading import load_reward
from rl_bridge.rewards.model import RewardModel
from rl_bridge.rewards.process import AskedElsewhere
from rl_bridge.rewards.protocols import Protocol, Reward
from rl_bridge.rewards.rewards import NamedReward, Rewards, with_rows
from rl_bridge.rewards.verifiable import exact_match

Source = str | Reward
# What a run's fingerprint covers. The package of this mark imports torch, which a reward's own process does without.
MAY_CHANGE = {"resume": "may change"}


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """What the completions of a run are scored by."""

    reward: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    """``FILE.py:function``, ``model:FOLDER`` (a trained reward model), ``judge:FILE.toml`` (a model that judges over
    HTTP) or ``http://…`` (a reward model's server); several with names: ``right=a.py:right style=judge:style.toml``.
    ``environment`` is the conversation's own. None compares the completion with the row's ``answer`` (``exact``)."""
    reward_weights: tuple[float, ...] = ()
    """One a reward, in the order of their names; none are all 1."""
    reward_protocol: Protocol | None = None
    """How the functions are called, where their parameters do not show it."""
    reward_timeout: float | None = field(default=None, metadata=MAY_CHANGE)
    """Seconds for one result of a reward function, which then runs in a process of its own."""

    def rewards(self) -> Rewards:
        """The rewards, loaded. Raises ValueError or FileNotFoundError where one is not there."""
        return load(
            self.reward, weights=self.reward_weights, protocol=self.reward_protocol, timeout=self.reward_timeout
        )


def load(
    sources: Sequence[Source] | Source = (),
    *,
    weights: Sequence[float] = (),
    protocol: Protocol | None = None,
    timeout: float | None = None,
) -> Rewards:
    """The rewards that ``sources`` name: as ``RewardOptions.reward``, or functions; ``NAME=SOURCE`` gives a name.

    ``timeout`` is in seconds for one result of a function, which then runs in a process that can be ended.

    >>> load([lambda completion, row: len(completion)]).names
    ('reward',)

    Raises:
        FileNotFoundError: no such file.
        ValueError: a source of another form, a file that cannot be loaded, two rewards of one name.
    """
    given = [sources] if isinstance(sources, str) or callable(sources) else list(sources) or ["exact"]
    loaded, marks = [], []
    for source in given:
        name, rest = _named(source)
        name = name or ("reward" if len(given) == 1 and rest != "environment" else _own_name(rest))
        loaded.append(_load(name, rest, protocol, timeout))
        marks.append((name, _fingerprint(rest)))
    return Rewards(loaded, weights, fingerprint=repr((marks, protocol)))


def score(
    reward: Rewards | Reward, trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]]
) -> list[Trajectory]:
    """The trajectories with the row that each came from (number ``group`` of ``rows``) and its rewards.

    Raises:
        RewardError: as ``Rewards.score``.
        ValueError: a group that has no row.
    """
    rewards = reward if isinstance(reward, Rewards) else load(reward)
    return rewards.score(with_rows(trajectories, rows))


def _load(name: str, source: Source, protocol: Protocol | None, timeout: float | None) -> NamedReward:
    if source == "exact":
        return Asked(name, exact_match)
    if source == "environment":
        return EnvironmentReward(name)
    if isinstance(source, str):
        kind, _, rest = source.partition(":")
        if kind in ("http", "https"):
            return Asked(name, RemoteRewardModel(server=Server(url=source)), "batch", title=name)
        if kind == "judge":
            return Asked(name, Judge.of_file(Path(rest)), "batch", title=name)
        if kind == "model":
            return Asked(name, RewardModel(rest), "batch", title=name)
    function = load_reward(source) if isinstance(source, str) else source
    here = Asked(name, function, protocol)  # what its parameters do not show is said before a process is made
    return here if timeout is None else AskedElsewhere(name, source, here.protocol, timeout)


def reward_models(sources: Sequence[Source]) -> list[str]:
    """The folders or hub ids of the reward models in this process among ``sources``.

    >>> reward_models(["right=exact", "learned=model:runs/judged/model"])
    ['runs/judged/model']
    """
    rests = [rest for _, rest in map(_named, sources) if isinstance(rest, str)]
    return [rest.removeprefix("model:") for rest in rests if rest.startswith("model:")]


def _named(source: Source) -> tuple[str, Source]:
    match = re.fullmatch(r"([A-Za-z_]\w*)=(.+)", source, re.DOTALL) if isinstance(source, str) else None
    return ("", source) if match is None else (match[1], match[2])


def _own_name(source: Source) -> str:
    if not isinstance(source, str):
        return getattr(source, "__name__", "reward")
    kind, _, rest = source.partition(":")
    if kind in ("http", "https", "model"):
        return "reward_model"
    return Path(rest).stem if kind == "judge" else source.rpartition(":")[2]


def _fingerprint(source: Source) -> str:
    if not isinstance(source, str):
        return f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', type(source).__qualname__)}"
    kind, _, rest = source.partition(":")
    files = {"model": Path(rest) / "config.json", "judge": Path(rest)}
    if kind in (*files, "http", "https"):
        name, file = f"{kind} {Path(rest).name}", files.get(kind)
    else:  # a function of a file, which may have been moved since
        path, _, name = source.rpartition(":")
        file = Path(path)
    text = file.read_bytes() if file is not None and file.is_file() else b""
    return f"{name} {hashlib.sha256(text).hexdigest()}"
