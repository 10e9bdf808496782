"""The ledger: all prompts of a rollout with the states of their samples; also as JSON for checkpoints."""

import base64
import copy
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Key = tuple[int, int]
"""Number of the prompt, number of its sample."""
FAILED = ("abort", "error")
"""Reasons of an end that is no act of the policy."""


class State(StrEnum):
    """Where a sample is. It is in one state at a time, and goes down this list.

    Two may go back: from RUNNING to WAITING, and a conversation from RUNNING to ASKING after each turn.
    """

    ASKING = "asking"
    """Its environment is to reply. A conversation alone: it begins here, and goes from here to WAITING."""
    WAITING = "waiting"
    """To be drawn, from the tokens so far."""
    RUNNING = "running"
    """An engine draws it."""
    REWARDING = "rewarding"
    """Complete; its rewards are not known yet."""
    READY = "ready"
    """Its rewards are known."""
    COMPARED = "compared"
    """Greedy: a step took its group, and its rewards were the baseline of the others."""
    TRAINED = "trained"
    DROPPED = "dropped"
    """A step took its group and left the sample out: ``reason`` says why."""


class Tokens(NamedTuple):
    """Tokens that one version of the weights drew in one go."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    allowed: Sequence[Sequence[int]] | None
    """Ids that the truncated sampler allowed for each token; None where nothing was truncated."""


@dataclass
class Turn:
    """A message of an environment, and how much the policy has drawn behind it."""

    messages: list[dict[str, Any]]
    reward: float | None
    done: bool
    state_id: int | None
    tools: list[Any] = field(default_factory=list)
    """Schemas for the chat template."""
    given: list[int] = field(default_factory=list)
    """Tokens that stand for the messages, before the policy's turn."""
    room: int = 0
    """Tokens that the policy may draw in this turn; 0: the conversation ended here."""
    drawn: int = 0
    """Tokens that the policy has drawn in this turn."""


@dataclass
class Sample:
    """One completion of a prompt, or one conversation that begins with a row."""

    seed: int
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    allowed: list[Sequence[int]] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(Version, tokens that it drew), in the order of the tokens; no two beside each other are of one version."""
    reason: str | None = None
    """Why the sample ended: "stop", "length", "abort", "error"."""
    rewards: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Time that engines spent on the sample before ``since``."""
    since: float = 0.0
    """When the sample went into the engine that draws it."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of the environment in a conversation. ``tokens`` and the rest are those that the policy drew."""
    beginnings: int = 0
    """How often the sample began anew. Replies of an environment to an earlier beginning are dropped."""
    greedy: bool = False
    """Whether the tokens are the most likely ones. No step trains on such a sample, a baseline of the others."""

    @property
    def versions(self) -> list[int]:
        """The version that drew each token."""
        return [version for version, count in self.spans for _ in range(count)]

    @property
    def sequence(self) -> list[int]:
        """The tokens behind the prompt so far, those of the environment among them."""
        if not self.turns:
            return self.tokens
        tokens, start = [], 0
        for turn in self.turns:
            tokens += [*turn.given, *self.tokens[start : start + turn.drawn]]
            start += turn.drawn
        return tokens

    @property
    def said(self) -> int:
        """Tokens of the turn that goes on."""
        return self.turns[-1].drawn if self.turns else len(self.tokens)

    def room(self, limit: int) -> int:
        """Tokens that may be drawn now, of ``limit`` in a completion."""
        return self.turns[-1].room - self.turns[-1].drawn if self.turns else limit - len(self.tokens)

    def left_at(self, now: float) -> None:
        """Count the time in an engine, which returned the sample."""
        self.seconds += now - self.since

    def append(self, drawn: Tokens, version: int) -> None:
        """Add tokens of one version."""
        if not drawn.tokens:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = version, self.spans[-1][1] + len(drawn.tokens)
        else:
            self.spans.append((version, len(drawn.tokens)))
        if drawn.allowed is not None:
            assert self.allowed is not None or not self.tokens, "allowed tokens are known of all tokens or of none"
            self.allowed = [*(self.allowed or []), *drawn.allowed]
        self.tokens += drawn.tokens
        self.logprobs += drawn.logprobs
        if self.turns:
            self.turns[-1].drawn += len(drawn.tokens)


@dataclass
class Group:
    """A prompt and its samples."""

    number: int
    prompt: Any
    samples: list[Sample]
    admitted: int
    """Version of the rollout's weights when the prompt went in: no token is of an older one."""

    def all_in(self, *states: State) -> bool:
        """Whether every sample is in one of the states."""
        return all(sample.state in states for sample in self.samples)


class Ledger:
    """Prompts in the order of the data, each with its samples, until a step has trained on them.

    Every change is a method that names the state before; a sample in another state is an AssertionError. So no sample
    can be lost or completed twice.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        """Untrained prompts by number, in order."""
        self.opened = 0
        """Prompts that went in so far: the number of the next one."""
        self.taken: set[int] = set()
        """Trained prompts behind the first untrained one."""
        self.finished: Counter[str] = Counter()
        """Counts of samples that were trained on, compared with, or dropped, the last by reason."""

    @property
    def head(self) -> int:
        """The number of the first untrained prompt."""
        return next(iter(self.groups), self.opened)

    def __getitem__(self, key: Key) -> Sample:
        """An untrained sample."""
        return self.groups[key[0]].samples[key[1]]

    def keys(self, *states: State) -> Iterator[Key]:
        """Untrained samples in these states, in order."""
        for group in self.groups.values():
            for place, sample in enumerate(group.samples):
                if sample.state in states:
                    yield group.number, place

    def counts(self) -> dict[str, int]:
        """Samples by state."""
        by_state = Counter(str(sample.state) for group in self.groups.values() for sample in group.samples)
        none = {str(state): 0 for state in State}
        over = {state: self.finished[state] for state in ("trained", "compared")}
        return {**none, **by_state, **over, "dropped": self.finished.total() - sum(over.values())}

    def open(
        self, prompt: Any, seeds: Sequence[int], version: int, state: State = State.WAITING, *, greedy: bool = False
    ) -> Group:
        """Take in the next prompt, with one sample a seed. ``greedy``: of the last sample."""
        group = Group(self.opened, prompt, [Sample(seed, state) for seed in seeds], version)
        group.samples[-1].greedy = greedy
        self.groups[group.number] = group
        self.opened += 1
        return group

    def submitted(self, key: Key, now: float) -> None:
        """Note that an engine has the sample."""
        sample = self._change(key, State.RUNNING, State.WAITING)
        sample.since = now

    def returned(self, key: Key, drawn: Tokens, version: int, now: float) -> None:
        """Take the sample back from an engine, unfinished, with the tokens that were drawn."""
        sample = self._change(key, State.WAITING, State.RUNNING)
        sample.append(drawn, version)
        sample.left_at(now)

    def lost(self, key: Key) -> None:
        """Note that the engine is gone: its new tokens are lost, and the earlier ones are still here."""
        self._change(key, State.WAITING, State.RUNNING)

    def ended(self, key: Key, drawn: Tokens, version: int, reason: str) -> None:
        """Take the last tokens, and the reason of the end."""
        sample = self._change(key, State.REWARDING, State.RUNNING)
        sample.append(drawn, version)
        sample.reason = reason

    def spoke(self, key: Key, drawn: Tokens, version: int, now: float) -> None:
        """Take the last tokens of a turn of the policy."""
        sample = self._change(key, State.ASKING, State.RUNNING)
        sample.append(drawn, version)
        sample.left_at(now)

    def told(self, key: Key, turn: Turn | None, reason: str | None) -> None:
        """Take the environment's turn, None if it failed. With a ``reason`` the conversation has ended."""
        sample = self._change(key, State.WAITING if reason is None else State.REWARDING, State.ASKING)
        sample.reason = reason
        if turn is not None:
            sample.turns.append(turn)

    def begin_again(self, key: Key) -> None:
        """Begin the conversation anew, without its turns."""
        sample = self[key]
        assert sample.state in (State.WAITING, State.ASKING), f"sample {key} is {sample.state}"
        lasting: Any = {"seconds": sample.seconds, "greedy": sample.greedy}
        fresh = Sample(sample.seed, State.ASKING, beginnings=sample.beginnings + 1, **lasting)
        self.groups[key[0]].samples[key[1]] = fresh

    def aborted(self, key: Key) -> None:
        """End a sample with which no engine is to go on."""
        self._change(key, State.REWARDING, State.WAITING).reason = "abort"

    def full(self, key: Key) -> None:
        """End a sample that may have no more tokens."""
        self._change(key, State.REWARDING, State.WAITING).reason = "length"

    def scored(self, number: int, rewards: Sequence[dict[str, float]]) -> None:
        """Take the rewards of each sample of a prompt."""
        for place, (_, sample_rewards) in enumerate(zip(self.groups[number].samples, rewards, strict=True)):
            self._change((number, place), State.READY, State.REWARDING).rewards = dict(sample_rewards)

    def take(self, number: int) -> Group:
        """Take a prompt out of the ledger, as a step trains on it."""
        for place, sample in enumerate(self.groups[number].samples):
            state = State.DROPPED if sample.reason in FAILED else State.TRAINED
            state = State.COMPARED if sample.greedy else state
            self._change((number, place), state, State.READY)
            self.finished[str(sample.reason) if state is State.DROPPED else str(state)] += 1
        self.taken.add(number)
        group = self.groups.pop(number)
        self.taken = {later for later in self.taken if later > self.head}
        return group

    def _change(self, key: Key, state: State, before: State) -> Sample:
        sample = self[key]
        assert sample.state == before, f"sample {key} is {sample.state}, {state} comes after {before}"
        sample.state = state
        return sample


PLAIN = ("seed", "tokens", "logprobs", "reason", "rewards", "seconds")


def saved(ledger: Ledger) -> dict[str, Any]:
    """The ledger without its prompts, as JSON for a checkpoint. Floats come back from JSON bit for bit.

    A sample in an engine is saved with the tokens that it had before: a resumed run draws the rest again.
    """
    return {
        "opened": ledger.opened,
        "taken": sorted(ledger.taken),
        "finished": dict(ledger.finished),
        "groups": [
            {"number": group.number, "admitted": group.admitted, "samples": [_sample(s) for s in group.samples]}
            for group in ledger.groups.values()
        ],
    }


def loaded(state: dict[str, Any], prompt: Callable[[int], Any]) -> Ledger:
    """The ledger that ``saved`` turned into JSON. ``prompt(number)`` is called for every untrained prompt in order."""
    ledger = Ledger()
    ledger.opened, ledger.taken = state["opened"], set(state["taken"])
    ledger.finished = Counter(state["finished"])
    for group in state["groups"]:
        number = group["number"]
        samples = [_of(sample) for sample in group["samples"]]
        ledger.groups[number] = Group(number, prompt(number), samples, group["admitted"])
    return ledger


def emptied(state: dict[str, Any], first: int) -> Ledger:
    """The ledger that goes on without the groups of ``state``, which ``saved`` made. ``first``: the next number."""
    ledger = Ledger()
    ledger.opened, ledger.finished = first, Counter(state["finished"])
    return ledger


def passed_over(state: dict[str, Any], skips: Mapping[int, int], first: int) -> dict[int, int]:
    """Number of a prompt → rows of the stream right before its own that are trained on, in the ledger of ``emptied``.

    ``skips``: the same for the ledger of ``state``, from its first untrained prompt on. The stream is before that one.
    """
    untrained, opened = {group["number"] for group in state["groups"]}, state["opened"]
    renumbered, number, passed = dict[int, int](), first, 0
    for before in range(min(untrained, default=opened), max([opened, *skips]) + 1):
        passed += skips.get(before, 0)
        if before < opened and before not in untrained:
            passed += 1
            continue
        if passed:
            renumbered[number] = passed
        number, passed = number + 1, 0
    return renumbered


def _sample(sample: Sample) -> dict[str, Any]:
    state = State.WAITING if sample.state is State.RUNNING else sample.state
    return {
        "state": str(state),
        "greedy": sample.greedy,
        # Copies: the state is written while engines go on.
        **{name: copy.copy(getattr(sample, name)) for name in PLAIN},
        "spans": [list(span) for span in sample.spans],
        "turns": [asdict(turn) for turn in sample.turns],
        "allowed": None if sample.allowed is None else [_packed(ids) for ids in sample.allowed],
    }


def _of(saved: dict[str, Any]) -> Sample:
    return Sample(
        **{name: saved[name] for name in PLAIN},
        state=State(saved["state"]),
        spans=[(version, count) for version, count in saved["spans"]],
        turns=[Turn(**turn) for turn in saved.get("turns", ())],
        greedy=saved.get("greedy", False),
        allowed=None if saved["allowed"] is None else [_unpacked(text) for text in saved["allowed"]],
    )


def _packed(ids: Sequence[int]) -> str:
    """Ids as base64: there may be thousands a token, and no text in JSON is shorter."""
    return base64.b64encode(array("i", ids).tobytes()).decode()


def _unpacked(text: str) -> array:
    return array("i", base64.b64decode(text))
