"""``Rewards``: every named reward of a run, asked about a batch of trajectories."""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from rl_bridge.data.messages import Chat
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.rewards.function import OWN_PROCESS, RewardError, with_completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A run that waits for a reward must not look like one that trains.

logger = logging.getLogger(__name__)
EVERY = 60.0
"""Seconds without a result until the first line, and from one line to the next."""


@contextmanager
def watched(awaited: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """While the block runs, warn of the ``awaited`` result. The block gets a function to call with each result.

    No reward is ended here: the user's ``reward_timeout`` says how long one may take.
    """
    over, last = threading.Event(), [time.monotonic()]

    def watch() -> None:
        warned = last[0]
        while not over.wait(max(0.0, max(warned, last[0]) + EVERY - time.monotonic())):
            since = time.monotonic() - last[0]
            if since >= EVERY and time.monotonic() - warned >= EVERY:
                warned = time.monotonic()
                logger.warning("waiting for %s, for %.0f s now", awaited(), since)

    def result() -> None:
        last[0] = time.monotonic()

    thread = threading.Thread(target=watch, daemon=True, name="rewards are awaited")
    thread.start()
    try:
        yield result
    finally:
        over.set()
        thread.join()


OnNone = Literal["refuse", "leave-out"]
"""A reward's None: an error, or a completion that the reward does not apply to."""


class NamedReward(Protocol):
    """One reward, or several that are computed together."""

    name: str

    @property
    def apart(self) -> bool:
        """Whether the values of a trajectory depend on no other of the call, so that a call may have any of them."""
        ...

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, float]]:
        """The values of each trajectory by name, in order; raises RewardError with the row."""
        ...

    def close(self) -> None:
        """Close the reward's process and connections."""
        ...


SHOWING = 64
"""Rows of a run whose rewards are asked for their names before a model is made."""


class Rewards:
    """The rewards of a run under their names, with a weight each.

    A function may return several under names of its own: ``names`` has them after ``try_on`` or the first ``score``.
    """

    def __init__(
        self,
        rewards: Sequence[NamedReward],
        weights: Sequence[float] = (),
        *,
        none: OnNone = "refuse",
        fingerprint: Callable[[], str] = str,
    ) -> None:
        """``weights`` in the order of the names; none are all 1. ``fingerprint``: of the rewards' files and names.

        ``none`` "leave-out": a reward that returns None does not apply to the completion. The others make its number,
        and a completion without any is left out and counted.
        """
        self.none: OnNone = none
        """The rule for a reward that is None."""
        self._rewards = tuple(rewards)
        self._names: list[tuple[str, ...]] = [(reward.name,) for reward in self._rewards]
        self._settled: set[int] = set()
        """Places of the rewards whose values have shown their names."""
        self._weights = tuple(float(weight) for weight in weights)
        self._fingerprint = fingerprint
        self._one_at_a_time = threading.Lock()
        if not self._rewards:
            raise ValueError("there is no reward")
        if none not in get_args(OnNone):
            raise ValueError(f"none is one of {', '.join(get_args(OnNone))}, got {none!r}")
        if not all(map(math.isfinite, self._weights)):
            raise ValueError(f"weights of rewards are finite numbers, got {self._weights}")
        self._check()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rewards, in the order of the weights."""
        return tuple(name for names in self._names for name in names)

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight a name. Raises ValueError where there are more or fewer weights than names."""
        if self._weights and len(self._weights) != len(self.names):
            raise ValueError(f"there are {len(self._weights)} weights {self._weights} for the rewards {self.names}")
        return self._weights or (1.0,) * len(self.names)

    @property
    def environment(self) -> str | None:
        """The name of the environment's own reward; None where it is none of these."""
        return next((reward.name for reward in self._rewards if getattr(reward, "of_environment", False)), None)

    @property
    def apart(self) -> bool:
        """Whether every reward scores each trajectory by itself."""
        return all(reward.apart for reward in self._rewards)

    @property
    def fingerprint(self) -> str:
        """Changes where a reward's files, name or weight do: a resumed run compares it."""
        return hashlib.sha256(repr((self._fingerprint(), self._weights)).encode()).hexdigest()[:16]

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with ``rewards``: one float for each of ``names``. ``row`` and ``messages`` must be filled.

        Calls from several threads come one after another.

        Raises:
            RewardError: a reward that raises, hangs, dies or returns no finite number: its name and the row.
        """
        with self._one_at_a_time:
            return self._score(trajectories)

    def _score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        results: list[dict[str, float]] = [{} for _ in trajectories]
        settled = len(self._settled)
        for place, reward in enumerate(self._rewards if trajectories else ()):
            values = self._named_values(place, reward, trajectories)
            for rewards, own in zip(results, values, strict=True):
                rewards |= {name: own.get(name, math.nan) for name in self._names[place]}
        if len(self._settled) > settled:
            self._check()
        return [trajectory.labelled(rewards=rewards) for trajectory, rewards in zip(trajectories, results, strict=True)]

    def checkpoint_state(self) -> dict[str, Any]:
        """The names that functions gave their rewards: a resumed run may train on rewards of the run before."""
        return {"names": [list(names) for names in self._names], "settled": sorted(self._settled)}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        self._names, self._settled = [tuple(names) for names in state["names"]], set(state["settled"])

    def _named_values(
        self, place: int, reward: NamedReward, trajectories: Sequence[Trajectory]
    ) -> list[dict[str, float]]:
        """A reward's values by name; a name that is not there, of a None or of a dictionary without it, is no reward.

        The values of the first call that has any show the names; None is that of all names.
        """
        leaves_out, settled = self.none == "leave-out", place in self._settled
        results, names = list[dict[str, float]](), dict.fromkeys(self._names[place] if settled else ())
        for trajectory, values in zip(trajectories, _awaited(reward, trajectories), strict=True):
            where = trajectory.row.get("_where", "a row")
            if not leaves_out and any(map(math.isnan, values.values())):
                raise RewardError(
                    f"reward {getattr(reward, 'title', reward.name)} on {where} "
                    f"returned None, expected a finite number{with_completion(trajectory)}; with --reward-none "
                    'leave-out (none="leave-out") None says that the reward does not apply to a completion'
                )
            if values.keys() == {reward.name} and math.isnan(values[reward.name]):
                results.append({})
                continue
            others = values.keys() - names.keys() if leaves_out else values.keys() ^ names.keys()
            if others and (settled or (names and not leaves_out)):
                raise RewardError(
                    f"reward {reward.name} on {where} returned the rewards {sorted(values)}, before they were "
                    f"{sorted(names)}: a dictionary has every name, with None where one does not apply"
                )
            names |= dict.fromkeys(values)
            results.append(values)
        if names:
            self._names[place] = tuple(names)
            self._settled.add(place)
        return results

    def total(self, rewards: Mapping[str, float]) -> float:
        """The weighted sum of a trajectory's rewards.

        >>> from rl_bridge.rewards import load
        >>> load(["exact"], weights=[2.0]).total({"reward": 0.5})
        1.0
        """
        pairs = [(weight, rewards[name]) for name, weight in zip(self.names, self.weights, strict=True)]
        return sum(weight * value for weight, value in pairs if not math.isnan(value))

    def try_on(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        beside: bool = False,
        conversations: bool = False,
    ) -> None:
        """Ask every reward about a few of ``rows``, with the row's answer and with nothing as the completion.

        A reward that fails shows here, before a model is made or warmed up. The tokens of the trial are made up.
        ``beside``: the rewards will be asked from another thread, too, and are tried there as well.
        ``conversations``: an environment will speak with the policy, and TRL's rewards get messages.

        Raises:
            RewardError: as ``score`` does.
            ValueError: weights that are not one a name; or two rewards of one name.
        """
        trials = [trial for row in rows[:2] for trial in _trials(row, tokenizer, conversations)]
        numbers = [value for trial in self.score(trials) for value in trial.rewards.values()]
        # A reward that is None for one task shows the names of its numbers where it applies: in rows from everywhere.
        for row in rows[2 :: max(1, len(rows) // SHOWING)]:
            for place, reward in enumerate(self._rewards):
                if place not in self._settled:
                    values = self._named_values(place, reward, list(_trials(row, tokenizer, conversations)))
                    numbers += [value for own in values for value in own.values()]
        if numbers and all(map(math.isnan, numbers)):
            raise RewardError(
                f"no reward of {', '.join(self.names)} returned a number for {trials[0].row.get('_where', 'a row')} or "
                f"{trials[-1].row.get('_where', 'a row')}, with the row's answer and with nothing: is a return missing?"
            )
        self._check()
        if unnamed := [reward.name for place, reward in enumerate(self._rewards) if place not in self._settled]:
            try:
                _ = self.weights
            except ValueError as error:
                raise ValueError(
                    f"{error}; {unnamed[0]} returned None for all rows that were tried, so that the names of its "
                    "numbers are not known: give a dictionary with every name, and None where one does not apply"
                ) from error
        if beside:
            self._try_beside(trials)

    def _try_beside(self, trials: Sequence[Trajectory]) -> None:
        failures: list[BaseException] = []

        def score() -> None:
            try:
                self.score(trials)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=score, name="rewards are tried", daemon=True)
        thread.start()
        thread.join()
        if failures:
            way_on = "" if OWN_PROCESS in str(failures[0]) else OWN_PROCESS
            raise RewardError(
                f"{failures[0]}; in the program's main thread the same call succeeded, and rollouts that run ahead of "
                f"training ask for rewards from another thread{way_on}"
            ) from failures[0]

    def close(self) -> None:
        """Close every reward."""
        for reward in self._rewards:
            reward.close()

    def _check(self) -> None:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            own = any(names != (reward.name,) for names, reward in zip(self._names, self._rewards, strict=True))
            way_on = "give the key of a dictionary another name" if own else "name each: NAME=SOURCE"
            raise ValueError(f"two rewards have the name {twice[0]!r}; {way_on}")
        if len(self._settled) == len(self._rewards):
            _ = self.weights


def _awaited(reward: NamedReward, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, float]]:
    """The reward's values, with a warning a minute while none comes."""
    done = 0

    def awaited() -> str:
        where = trajectories[min(done, len(trajectories) - 1)].row.get("_where", "a row")
        return f"reward {reward.name} on {where} ({done} of {len(trajectories)} results so far)"

    with watched(awaited) as result:
        for values in reward.score(trajectories):
            done += 1
            result()
            yield values


def with_rows(trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The trajectories with the row that each came from: number ``group`` of ``rows``.

    Raises:
        ValueError: a group that has no row.
    """
    for trajectory in trajectories:
        if not 0 <= trajectory.group < len(rows):
            raise ValueError(f"a trajectory of group {trajectory.group} has no row; there are {len(rows)}")
    return [trajectory.labelled(row=rows[trajectory.group]) for trajectory in trajectories]


def _trials(
    row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase | None", conversations: bool
) -> list[Trajectory]:
    # Not at the top: the process of a reward with a time limit needs no tokenizer.
    from rl_bridge.models.encoding import encode_prompt, messages_of

    prompt = Chat.of(row, row.get("prompt", ""))
    ids = [0] if tokenizer is None else encode_prompt(tokenizer, prompt)
    trials = []
    for text in dict.fromkeys([str(row.get("answer", "")), ""]):
        messages = (*messages_of(prompt), {"role": "assistant", "content": text})
        # Any token will do: the tokenizer need not know the characters of the answer.
        turns = (len(messages) - 1,) if conversations else ()
        about = {"messages": messages, "turn_messages": turns, "tools": tuple(prompt.tools)}
        trials.append(single_turn(ids, ids[-1:], row=row, **about))
    return trials
