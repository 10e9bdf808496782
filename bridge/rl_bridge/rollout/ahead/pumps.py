"""State machines: the bound on rollouts that run ahead, the next command for an engine, the prompts of a step."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_bridge.common.terminal import given
from rl_bridge.rollout.ahead.ledger import Group, Key, Ledger, State, Tokens, Turn


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which prompts may go in while the rollout holds version k of the policy.

    Prompts have the numbers 0, 1, 2, … in the order of the data. Version k is the policy after k training steps. Each
    step trains on P = ``prompts_per_step`` groups. It takes them one by one, and each is one of the ``window`` = W
    prompts from the first untrained one on. W = 1 takes prompts in their order; a larger window lets a step pass over
    prompts whose completions take long.

    **Theorem.** Let prompt g go in at version k only if g < (k + 1 + S) · P, where S is ``max_staleness`` less
    ⌈(W − 1) / P⌉. If the version that the rollout holds never falls, every token that step t trains on was drawn by a
    version of at least t − ``max_staleness``.

    *Proof.* Let step t take g, which went in at version k. Before step t there were t · P prompts taken, and g was not
    among them. As long as g is untrained, the first untrained prompt is at most g, so that no prompt from g + W on was
    taken. Therefore t · P ≤ g + W − 1 < (k + 1 + S) · P + W − 1, and t − k ≤ S + ⌈(W − 1) / P⌉ = ``max_staleness``.
    The tokens of g were drawn at version k or later. ∎

    No prompt is refused or dropped for its age: every prompt that went in is trained on, however long it takes.

    >>> one_ahead = Admission(max_staleness=1, prompts_per_step=4)
    >>> one_ahead.limit(version=0), one_ahead.limit(version=3)
    (8, 20)
    """

    max_staleness: int
    prompts_per_step: int
    window: int = 1
    steps: int | None = None
    """Training steps of the run: prompts of later steps never go in."""

    def __post_init__(self) -> None:
        """Refuse a window that the staleness leaves no room for.

        Raises:
            ValueError: with the smallest ``max_staleness`` of this window.
        """
        if self.max_staleness < 0 or self.prompts_per_step < 1 or self.window < 1:
            raise ValueError(
                "need max_staleness ≥ 0, prompts_per_step ≥ 1 and window ≥ 1, got "
                f"{given(self, 'max_staleness', 'prompts_per_step', 'window')}"
            )
        if self.ahead < 0:
            raise ValueError(
                f"a window of {self.window} prompts, {self.prompts_per_step} a step, needs max_staleness ≥ "
                f"{self.max_staleness - self.ahead}, got {self.max_staleness}"
            )

    @property
    def ahead(self) -> int:
        """S: the steps whose prompts may be in the rollout besides those of the next step."""
        return self.max_staleness - -(-(self.window - 1) // self.prompts_per_step)

    def limit(self, version: int) -> int:
        """Prompts with numbers below this may go in while the rollout holds ``version``."""
        limit = (version + 1 + self.ahead) * self.prompts_per_step
        return limit if self.steps is None else min(limit, self.steps * self.prompts_per_step)

    def too_old(self, admitted: Mapping[int, int], trained: Collection[int]) -> list[int]:
        """Untrained prompts that a step could train on after the bound. None are, of those that went in by it.

        ``admitted``: number of an untrained prompt → the version at which it went in, maybe by a larger bound.
        ``trained``: the trained prompts behind the first of these.

        >>> Admission(max_staleness=1, prompts_per_step=2).too_old({4: 0, 5: 1}, ())
        [4]
        """

        def last_step(number: int) -> int:
            behind = {*range(number + 1, number + self.window), *(later for later in trained if later > number)}
            return (number + len(behind)) // self.prompts_per_step

        return [number for number, version in admitted.items() if last_step(number) - version > self.max_staleness]


class TrainingPump:
    """A state machine: step after step takes its prompts from the ledger, in an order that the ledger gives."""

    def __init__(self, ledger: Ledger, admission: Admission, step: int = 0) -> None:
        """``step``: the next one. The policy that it starts from is version ``step``."""
        self.ledger, self.admission, self.step = ledger, admission, step

    def batch(self) -> list[int] | None:
        """The prompts that the next step would take now, in order; None while too few are ready.

        They are taken one by one, each the first ready one of the window, which begins at the first untrained prompt.
        """
        ready = {number for number, group in self.ledger.groups.items() if group.all_in(State.READY)}
        left, chosen = list(self.ledger.groups), []
        while len(chosen) < self.admission.prompts_per_step:
            head = left[0] if left else self.ledger.opened
            next_ready = next(
                (number for number in left if number < head + self.admission.window and number in ready), None
            )
            if next_ready is None:
                return None
            chosen.append(next_ready)
            left.remove(next_ready)
        return sorted(chosen)

    def take(self) -> list[Group]:
        """The groups of the next step, which leave the ledger.

        Raises:
            AssertionError: a token is older than the bound, which the admission rules out.
        """
        numbers = self.batch()
        assert numbers is not None, f"step {self.step} was begun before its prompts were ready"
        oldest = self.step - self.admission.max_staleness
        groups = [self.ledger.take(number) for number in numbers]
        for group in groups:
            versions = [version for sample in group.samples for version, _ in sample.spans]
            assert all(oldest <= version <= self.step for version in versions), (
                f"step {self.step} has tokens of the versions {sorted(set(versions))} in prompt {group.number}, "
                f"max_staleness is {self.admission.max_staleness}"
            )
        return groups

    def trained(self) -> None:
        """The step has made the next version."""
        self.step += 1


UNDRAWN = (State.ASKING, State.WAITING, State.RUNNING)


class Row(NamedTuple):
    """A sample for an engine. Its random numbers depend on ``seed`` and the number of the draw alone."""

    key: Key
    prompt: Any
    tokens: tuple[int, ...]
    """Behind the prompt so far."""
    drawn: int
    """How many of these the policy drew: the number of the next draw."""
    said: int
    """How many of these are of the turn that goes on."""
    seed: int
    limit: int
    """Tokens that may still be drawn."""
    greedy: bool = False
    """The most likely tokens are drawn, however the other rows are sampled."""


class Ended(NamedTuple):
    """A row that has left the engine, with the tokens drawn since it went in. ``reason`` None: it is not finished."""

    key: Key
    drawn: Tokens
    reason: str | None


class Advance(NamedTuple):
    """Put rows in, and draw up to ``steps`` tokens of every row."""

    rows: tuple[Row, ...]
    steps: int
    exactly: bool = False
    """Whether no engine may draw on: the draws of a version then depend on the commands, and on no time."""


class Withdraw(NamedTuple):
    """Take rows out, finished or not."""

    keys: tuple[Key, ...]


class Restart(NamedTuple):
    """The engine is gone: make another one. It gets weights before rows."""


Command = Advance | Withdraw | Restart


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When the engine stops for new weights.

    ``partial``: between any two rounds, and its rows go on with the new weights. Else when it has no row any more.
    ``rounds``: after so many rounds beside a training step, however long either takes: the version that draws a token
    then depends on nothing but the ledger. None with ``deterministic``: when there is nothing to draw.
    """

    partial: bool = False
    deterministic: bool = True
    rounds: int | None = None
    steps: int = 8
    """Tokens of a row in one round."""
    limit: int = 2**31
    """Tokens of a completion."""
    seconds: float | None = None
    """After so many in engines a completion is aborted."""

    def __post_init__(self) -> None:
        """Refuse deterministic paces whose draws would depend on time, and counts below 1."""
        if self.steps < 1 or self.limit < 1 or (self.rounds is not None and self.rounds < 1):
            raise ValueError(f"steps, limit and rounds must be ≥ 1, got {given(self, 'steps', 'limit', 'rounds')}")
        if self.seconds is not None and (self.deterministic or not self.seconds > 0):
            raise ValueError(
                "a limit of seconds (request_seconds) must be > 0 and is not deterministic, got "
                f"{given(self, 'seconds', 'deterministic')}"
            )
        if self.rounds is not None and not (self.partial and self.deterministic):
            raise ValueError(
                "rounds (tokens_beside) are of deterministic partial rollouts, got "
                f"{given(self, 'rounds', 'partial', 'deterministic')}"
            )
        if self.partial and self.deterministic and self.rounds is None:
            raise ValueError(
                "deterministic partial rollouts need the number of tokens drawn beside a training step: give "
                "tokens_beside (--asynchronous.tokens-beside N), or deterministic=False "
                "(--asynchronous.no-deterministic)"
            )


class RolloutPump:
    """A state machine over a ledger. ``next`` gives the engine's next command; the other methods take what happened.

    The pump does nothing itself. ``held``: no row is in the engine and none goes in, so that its weights may change. It
    begins so.
    """

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        pace: Pace,
        prompt: Callable[[int], tuple[Any, Sequence[int]]],
        *,
        talks: bool = False,
        greedy: bool = False,
        apart: bool = False,
    ) -> None:
        """``prompt``: of a number, with a seed for each of its samples; called once a prompt, in order.

        ``talks``: samples are conversations. An engine draws one turn after another, and environments answer beside.
        ``greedy``: the last sample of each prompt is. ``apart``: the rewards of a sample depend on no other sample.
        """
        self.ledger, self.admission, self.pace, self._prompt = ledger, admission, pace, prompt
        self._talks, self._greedy, self._apart = talks, greedy, apart
        self._to_ask = list(ledger.keys(State.ASKING))
        self.version = -1
        """The version of the policy that the engine holds."""
        self.held, self.alive = True, True
        self.epoch = 0
        """The number of the engine. An answer of an engine that is gone is not taken."""
        self._wanted = False
        self._pending: Command | None = None
        self._beside = 0
        self._end_what_is_full()
        self._to_score = [group.number for group in ledger.groups.values() if group.all_in(State.REWARDING)]
        self._scoring = set(self._to_score)

    def _end_what_is_full(self) -> None:
        """Rows without room, which a checkpoint of an older version may have among the unfinished."""
        for key in tuple(self.ledger.keys(State.WAITING)):
            if self.ledger[key].room(self.pace.limit) < 1:
                self.ledger.full(key)

    def hold(self) -> None:
        """The weights are to change as soon as the pace allows."""
        self._wanted = True

    def release(self, version: int) -> None:
        """The engine has the weights of ``version``, and goes on."""
        assert self.held and self.alive and self._pending is None, "weights change while nobody draws"
        assert version >= self.version, f"version {version} after {self.version}"
        if version > self.version:
            self._beside = 0
            if self._talks and not self.pace.partial:
                self._begin_again_what_is_older(version)
        self.version, self.held, self._wanted = version, False, False

    def idle(self) -> bool:
        """Whether there is nothing to draw at this version."""
        undrawn = any(True for _ in self.ledger.keys(*UNDRAWN))
        return not undrawn and self.ledger.opened >= self.admission.limit(self.version)

    def next(self, now: float) -> Command | None:
        """The engine's next command; None: none before something else happens. The pump is asked again then."""
        if self._pending is not None:
            return None
        if not self.alive:
            self._pending = Restart()
        elif not self.held:
            self._pending = self._command(now)
        return self._pending

    def _command(self, now: float) -> Command | None:
        running = tuple(self.ledger.keys(State.RUNNING))
        late = tuple(key for key in running if self._is_late(key, now))
        if late:
            return Withdraw(late)
        if self._may_stop(running):
            if self._wanted:
                if not running:
                    self.held = True
                    return None
                return Withdraw(running)
            if self.pace.deterministic:
                return None
        draining = self._wanted and not self.pace.partial and not self.pace.deterministic
        if not draining:
            self._open()
        if self.pace.deterministic and any(True for _ in self.ledger.keys(State.ASKING)):
            # The rows that are drawn beside each other must not depend on which environment is faster.
            return None
        rows = tuple(self._admit(now, begun=draining))
        return Advance(rows, self.pace.steps, self.pace.rounds is not None) if rows or running else None

    def _may_stop(self, running: Sequence[Key]) -> bool:
        """Whether the weights may change here."""
        if not self.pace.deterministic:
            return self.pace.partial or not (running or any(True for _ in self._begun()))
        enough = self.pace.rounds is not None and self._beside >= self.pace.rounds and self._next_batch_is_drawn()
        return enough or self.idle()

    def _next_batch_is_drawn(self) -> bool:
        """Whether all prompts of step ``version`` are drawn, of those that it takes in order."""
        end = (self.version + 1) * self.admission.prompts_per_step
        undrawn = next((number for number, _ in self.ledger.keys(*UNDRAWN)), self.ledger.opened)
        return undrawn >= end

    def _begun(self) -> list[Key]:
        """Conversations between two turns: with other weights they would be of several versions."""
        between = self.ledger.keys(State.ASKING, State.WAITING)
        return [key for key in between if self._talks and self.ledger[key].tokens]

    def _begin_again_what_is_older(self, version: int) -> None:
        """A conversation of one version whose engine died, or whose run was killed, between two turns."""
        for key in self._begun():
            if any(drawn != version for drawn, _ in self.ledger[key].spans):
                self.ledger.begin_again(key)
                self._to_ask.append(key)

    def _open(self) -> None:
        while self.ledger.opened < self.admission.limit(self.version):
            prompt, seeds = self._prompt(self.ledger.opened)
            first = State.ASKING if self._talks else State.WAITING
            group = self.ledger.open(prompt, seeds, self.version, first, greedy=self._greedy)
            if self._talks:
                self._to_ask += [(group.number, place) for place in range(len(seeds))]

    def _admit(self, now: float, *, begun: bool) -> list[Row]:
        """Samples that go into the engine: all that wait, or those conversations alone that have begun."""
        rows = []
        for key in tuple(self._begun() if begun else self.ledger.keys(State.WAITING)):
            sample, prompt = self.ledger[key], self.ledger.groups[key[0]].prompt
            if sample.state is State.WAITING:
                self.ledger.submitted(key, now)
                room, so_far = sample.room(self.pace.limit), tuple(sample.sequence)
                drawn, turn_tokens = len(sample.tokens), sample.said
                rows.append(Row(key, prompt, so_far, drawn, turn_tokens, sample.seed, room, sample.greedy))
        return rows

    def _is_late(self, key: Key, now: float) -> bool:
        sample, limit = self.ledger[key], self.pace.seconds
        return limit is not None and sample.seconds + now - sample.since > limit

    def answered(self, epoch: int, rows: Sequence[Ended], now: float) -> bool:
        """The engine has done its command; the rows that left it. False: it is gone, and its answer not taken."""
        if epoch != self.epoch:
            return False
        command, self._pending = self._pending, None
        drawn = self._next_batch_is_drawn()
        for key, tokens, reason in rows:
            if reason is None:
                self.ledger.returned(key, tokens, self.version, now)
                if self._is_over(key):
                    self.ledger.aborted(key)
            elif self._talks and reason == "stop":
                self.ledger.spoke(key, tokens, self.version, now)
                self._to_ask.append(key)
            else:
                self.ledger.ended(key, tokens, self.version, reason)
            self._look(key[0])
        if isinstance(command, Advance) and drawn:
            self._beside += 1
        return True

    def _is_over(self, key: Key) -> bool:
        limit = self.pace.seconds
        return limit is not None and self.ledger[key].seconds > limit

    def died(self, epoch: int) -> None:
        """The engine is gone. Its rows wait for another one, which draws the same tokens at the same weights."""
        if epoch != self.epoch:
            return
        self.alive, self.held, self._pending, self.epoch = False, True, None, self.epoch + 1
        for key in tuple(self.ledger.keys(State.RUNNING)):
            self.ledger.lost(key)

    def restarted(self) -> None:
        """There is another engine, without the policy's weights."""
        assert isinstance(self._pending, Restart), "no engine was asked for"
        self.alive, self._pending = True, None

    @property
    def has_to_ask(self) -> bool:
        """Whether ``to_ask`` has something."""
        return bool(self._to_ask)

    def to_ask(self) -> list[Key]:
        """Conversations whose environment is to answer, each turn given once."""
        keys, self._to_ask = self._to_ask, []
        return keys

    def told(self, key: Key, beginning: int, turn: Turn | None, reason: str | None) -> bool:
        """Take the answer of a conversation's environment, as ``Ledger.told``.

        False: the conversation has begun anew since it was asked, or has been trained on, and the answer is not taken.
        """
        if self._is_gone(key, beginning):
            return False
        self.ledger.told(key, turn, reason)
        self._look(key[0])
        return True

    def cannot_go_on(self, key: Key, beginning: int) -> None:
        """The environment is gone and another one answers otherwise: the conversation begins anew."""
        if not self._is_gone(key, beginning):
            self.ledger.begin_again(key)
            self._to_ask.append(key)

    def _is_gone(self, key: Key, beginning: int) -> bool:
        # A conversation that has begun anew may be over, and a step may have trained on the prompt.
        return key[0] not in self.ledger.groups or self.ledger[key].beginnings != beginning

    def to_score(self) -> list[Group]:
        """The prompts whose rewards are to be asked for in one call: all their samples are drawn, each is given once.

        All that wait; in deterministic runs those of one step, so that a call has the same prompts in every run. Where
        the rewards of samples are ``apart``, a call may have any prompts, and only their order is kept, for a function
        that counts or remembers: all that wait up to the first prompt that is not drawn.
        """
        numbers = sorted(self._to_score)
        if self.pace.deterministic and self._apart:
            unscored = (number for number, group in self.ledger.groups.items() if not group.all_in(State.READY))
            numbers = list(itertools.takewhile(set(numbers).__contains__, unscored))
        elif self.pace.deterministic:
            of_step = [self._of_step(number) for number in numbers]
            numbers = next((step for step in of_step if set(step) <= set(numbers)), [])
        self._to_score = [number for number in self._to_score if number not in numbers]
        return [self.ledger.groups[number] for number in numbers]

    def _of_step(self, number: int) -> list[int]:
        """The prompts of the step that a prompt belongs to, where steps take them in order."""
        count = self.admission.prompts_per_step
        first = number - number % count
        return list(range(first, first + count))

    def _look(self, number: int) -> None:
        if number not in self._scoring and self.ledger.groups[number].all_in(State.REWARDING):
            self._scoring.add(number)
            self._to_score.append(number)

    def scored(self, number: int, rewards: Sequence[dict[str, float]]) -> None:
        """The rewards of a prompt's samples."""
        assert number in self._scoring, f"the rewards of prompt {number} were not asked for, or came twice"
        self._scoring.remove(number)
        self.ledger.scored(number, rewards)
