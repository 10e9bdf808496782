"""Rewards by the names that the command line or a program gives, and the rewards that need no file."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.scrubbing import scrubbed_path
from rl_bridge.common.terminal import tell
from rl_bridge.common.user_marks import content_of, mark_of
from rl_bridge.data.rows import is_comparable, text_of
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.function import Asked, Protocol, Reward, RewardError, load_reward
from rl_bridge.rewards.reward_process import AskedElsewhere, RewardProcess
from rl_bridge.rewards.rewards import NamedReward, OnNone, Rewards, watched, with_rows
from rl_bridge.rewards.scoring_models import Judge, RemoteRewardModel, RewardModel, Server
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import of_folder


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, surrounding white space aside, else 0.

    A whole number is itself in a column of floats too.

    >>> exact_match(" 95", {"answer": "95"}), exact_match("96", {"answer": "95"}), exact_match("95", {"answer": 95.0})
    (1.0, 0.0, 1.0)

    Raises:
        ValueError: the answer is neither text nor a number.
    """
    answer = row["answer"]
    if not is_comparable(answer):
        raise ValueError(f"answer must be text or a number to be compared, got {answer!r}")
    return float(completion.strip() in (str(answer).strip(), text_of(answer).strip()))


class EnvironmentReward:
    """The reward that an environment gave over all turns of a trajectory; 0 where it gave none so far.

    An environment may give its reward at the end alone: a conversation that fails, or whose turns or tokens run out
    before, has none. A call in which no conversation came to the environment's end shows nothing of the environment:
    all of these have 0, and the first time that is printed. What is refused depends on no earlier call, which a run
    that is resumed does not have.
    """

    apart = False
    """Only a whole call shows whether the environment gives rewards."""
    of_environment = True
    """Steps of an episode have their parts of this reward."""

    def __init__(self, name: str = "environment") -> None:
        self.name = name
        self._told = False

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, float]]:
        """The values, in order.

        Raises:
            RewardError: an environment that gave no reward in a whole batch, and so none to a conversation that it
                ended itself.
        """
        # Without a request's id a trajectory is a trial that no environment has seen.
        without = [t for t in trajectories if t.request_id and "environment" not in t.rewards]
        gives_now = any(t.turn_rewards or t.rewards.get("environment") for t in trajectories)
        self._told |= gives_now
        by_itself = [t for t in without if t.finish_reason == "stop"]
        if by_itself and not gives_now:
            where = by_itself[0].row.get("_where", "a row")
            raise RewardError(
                f"reward environment on {where}: the environment gave none; its steps say reward=…, or another "
                "reward is named"
            )
        if without and not self._told:
            self._told = True
            tell(
                f"reward environment: of {len(without)} conversations the environment ended none, and gave no reward "
                "so far; these count 0. An environment that pays at its end alone needs more turns or tokens"
            )
        for trajectory in trajectories:
            yield {self.name: trajectory.rewards.get("environment", 0.0)}

    def close(self) -> None:
        """Do nothing: there is no process and no connection."""


Source = str | Reward
NO_FILES = ("http", "https", "judge", "model")
"""Words before the colon of a reward that is no function of a file."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards of a run's completions."""

    reward: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    """``FILE.py:function``, ``model:FOLDER`` (a trained reward model), ``judge:FILE.toml`` (a model that judges over
    HTTP) or ``http://…`` (a reward model's server, with limits as ``#timeout=5&retries=0``); several with names:
    ``right=a.py:right style=judge:style.toml``. ``environment`` is the conversation's own. None compares the completion
    with the row's ``answer`` (``exact``)."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward, in the order of their names; none are all 1."""
    reward_protocol: Protocol | None = None
    """Protocol of the functions' calls, where their parameters do not show one."""
    reward_timeout: float | None = field(default=None, metadata=MAY_CHANGE)
    """Seconds for one result of a reward function, which then runs in a process of its own."""
    reward_none: OnNone = "refuse"
    """A reward that returns None. leave-out: the reward does not apply to the completion, as to another task's rows; a
    completion that no reward applies to is left out, and counted (unrewarded)."""

    def __post_init__(self) -> None:
        """Refuse options for functions where no reward is a function."""
        check_options(self)
        if self.reward_timeout is not None and not self.reward_timeout > 0:
            raise ValueError(f"reward_timeout must be > 0 seconds, got {self.reward_timeout}")
        kinds = [str(source).partition(":")[0] for _, source in map(named, self.reward)]
        if all(kind in (*NO_FILES, "exact", "environment") for kind in kinds):
            require_used(self, ("reward_protocol", "reward_timeout"), "without a reward FILE.py:function")
        if all(kind in ("exact", "environment", "judge", "model") for kind in kinds):
            require_used(self, ("reward_none",), "without a reward that may return None, FILE.py:function or http")

    def rewards(self) -> Rewards:
        """The rewards, loaded. Raises ValueError or FileNotFoundError where one is not there."""
        return load(
            self.reward,
            weights=self.reward_weights,
            protocol=self.reward_protocol,
            timeout=self.reward_timeout,
            none=self.reward_none,
        )


def load(
    sources: Sequence[Source] | Source = (),
    *,
    weights: Sequence[float] = (),
    protocol: Protocol | None = None,
    timeout: float | None = None,
    none: OnNone = "refuse",
) -> Rewards:
    """The rewards of ``sources``: functions, or texts as ``RewardOptions.reward`` has them, with ``NAME=`` before them.

    ``timeout`` is in seconds for one result of a function, which then runs in a process that can be ended. ``none``
    "leave-out": a completion for which a function returns None is none of that reward's.

    >>> load([lambda completion, row: len(completion)]).names
    ('reward',)

    Raises:
        FileNotFoundError: no such file.
        ValueError: a source of another form, a file that cannot be loaded, two rewards of one name.
    """
    loaded = _Loaded(protocol, timeout)
    listed = [sources] if isinstance(sources, str) or callable(sources) else list(sources) or ["exact"]
    pairs: list[tuple[str, Source]] = []
    for source in listed:
        name, rest = named(source)
        name = name or ("reward" if len(listed) == 1 and rest != "environment" else _own_name(rest))
        if not isinstance(rest, str):
            name = _unlike(name, {other for other, _ in pairs})
        pairs.append((name, rest))
    rewards = [loaded.reward(name, rest) for name, rest in pairs]
    # Of files and objects as they are now: the program may go elsewhere, edits are for another run, and an object's
    # calls may change it. A model's folder, which nothing changes, takes long to read.
    marks = [None if _is_model(rest) else _fingerprint(rest) for _, rest in pairs]

    def fingerprint() -> str:
        own = [(name, mark or _fingerprint(rest)) for (name, rest), mark in zip(pairs, marks, strict=True)]
        return repr((own, protocol))

    return Rewards(rewards, weights, none=none, fingerprint=fingerprint)


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


class _Loaded:
    """The rewards of one call of ``load``. Functions of one file share its module, and with a time limit a process."""

    def __init__(self, protocol: Protocol | None, timeout: float | None) -> None:
        self._protocol: Protocol | None = protocol
        self._timeout = timeout
        self._files: dict[Path, ModuleType] = {}
        self._processes: defaultdict[str, RewardProcess] = defaultdict(RewardProcess)

    def reward(self, name: str, source: Source) -> NamedReward:
        """The reward of a source."""
        protocol, timeout = self._protocol, self._timeout
        if source == "exact":
            return Asked(name, exact_match)
        if source == "environment":
            return EnvironmentReward(name)
        if isinstance(source, str):
            kind, _, rest = source.partition(":")
            if kind in ("http", "https"):
                return Asked(name, _remote(source), "batch", title=name)
            if kind == "judge":
                return Asked(name, Judge.of_file(Path(rest)), "batch", title=name, apart=True)
            if kind == "model":
                return Asked(name, RewardModel(rest), "batch", title=name)
            if timeout is not None:
                # A file that hangs or ends its process while it is loaded harms no other process.
                process = self._processes[source.rpartition(":")[0]]
                return AskedElsewhere(name, source, protocol, timeout, process).begin()
            with watched(lambda: f"{source} to be loaded"):
                return Asked(name, load_reward(source, self._files), protocol)
        # Parameters that show no protocol are refused before a process is made.
        here = Asked(name, source, protocol, apart=isinstance(source, Judge))
        if timeout is None:
            return here
        return AskedElsewhere(name, source, here.protocol, timeout, self._processes[source.__module__])


def _remote(source: str) -> RemoteRewardModel:
    """The server of an address. Behind the # stand limits, which are not sent: #timeout=5&retries=0."""
    url, _, words = source.partition("#")
    kinds = {"timeout": float, "wait": float, "retries": int, "concurrency": int, "batch": int}
    limits: dict[str, Any] = {}
    for word in filter(None, words.split("&")):
        option, _, value = word.partition("=")
        try:
            limits[option] = kinds[option](value)
        except (KeyError, ValueError):
            raise ValueError(
                f"behind the # of a reward's address stand {', '.join(kinds)}, as #timeout=5&retries=0, got {word!r}"
            ) from None
    batch = {"batch": limits.pop("batch")} if "batch" in limits else {}
    return RemoteRewardModel(server=Server(url=url, **limits), **batch)


def reward_models(sources: Sequence[Source]) -> list[str]:
    """The folders or hub ids of the reward models in this process among ``sources``.

    >>> reward_models(["right=exact", "learned=model:runs/judged/model"])
    ['runs/judged/model']
    """
    rests = [rest for _, rest in map(named, sources) if isinstance(rest, str)]
    return [rest.removeprefix("model:") for rest in rests if rest.startswith("model:")]


def named(source: Source) -> tuple[str, Source]:
    """(The name before the source's ``=``, or nothing; the source behind it). Raises ValueError if it is empty."""
    match = re.fullmatch(r"([A-Za-z_]\w*)=(.+)", source, re.DOTALL) if isinstance(source, str) else None
    name, rest = ("", source) if match is None else (match[1], match[2])
    if isinstance(rest, str) and rest.strip() in ("model:", "judge:"):
        what = "folder of a reward model" if rest.startswith("model:") else "TOML file of a judge"
        raise ValueError(f"the reward {source!r} names no {what}: give it behind the colon, without a blank")
    return name, rest


def _unlike(name: str, others: Collection[str]) -> str:
    """The name of a function in hand, to which no ``NAME=`` can be given; with a number where another has it.

    >>> _unlike("style", {"style", "style_2"})
    'style_3'
    """
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    return next(own for own in names if own not in others)


def _own_name(source: Source) -> str:
    if not isinstance(source, str):
        own = getattr(source, "__name__", "reward")
        return own if own.isidentifier() else "reward"  # a lambda has no name
    kind, _, rest = source.partition(":")
    if kind in ("http", "https", "model"):
        return "reward_model"
    return Path(rest).stem if kind == "judge" else source.rpartition(":")[2]


def _is_model(source: Source) -> bool:
    return isinstance(source, RewardModel) or (isinstance(source, str) and source.startswith("model:"))


def _fingerprint(source: Source) -> str:
    """A fingerprint of the source's content: another one where a value may be another. Its place does not count."""
    if isinstance(source, RewardModel):
        source = f"model:{source.name}"
    if isinstance(source, RemoteRewardModel):
        source = source.server.url
    if not isinstance(source, str):
        return mark_of(source)
    kind, _, rest = source.partition(":")
    if kind == "model":
        # Not at the top: a reward's own process needs no torch.
        from rl_bridge.models.model_source import PretrainedSource

        return f"model {of_folder(PretrainedSource(rest).folder(), tell)}"
    if kind == "judge":
        return f"judge {hashlib.sha256(Path(rest).read_bytes()).hexdigest()}"
    if kind in ("http", "https"):
        return f"{kind} {scrubbed_path(source)}"
    path, _, name = source.rpartition(":")
    return f"{name} {content_of(Path(path))}" if path else name
