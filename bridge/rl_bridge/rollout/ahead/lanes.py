"""The threads that let the pumps work: one commands the engine's workers, one asks for rewards, the caller's trains."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines.engine import Engine, Revived
from rl_bridge.engines.worker import call_worker
from rl_bridge.rollout.ahead.environment_turns import Talks
from rl_bridge.rollout.ahead.ledger import Group, Key
from rl_bridge.rollout.ahead.pumps import UNDRAWN, Advance, Command, Ended, Restart, RolloutPump, TrainingPump, Withdraw
from rl_bridge.rollout.rollout_worker import EngineDied


class Lanes:
    """The workers of an ``InferenceEngine`` as one engine that a rollout pump commands.

    Each sample has its worker, by its number: the same rows lie beside each other in every run.

    A prompt of the ledger has its token ids as ``tokens``.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, samples: int) -> None:
        """``engine``: has workers that are ``Advancing``; ``samples``: of a prompt, a greedy one among them.

        Raises:
            ValueError: its workers are not ``Advancing``.
        """
        self._engine, self._sampling, self._samples = engine, sampling, samples
        missing = {"advance", "withdraw", "restart"} - engine.methods.keys()
        if missing:
            raise ValueError(
                f"the workers of {engine.name} cannot run ahead: they have no {', '.join(sorted(missing))}"
            )
        if isinstance(engine, Revived):
            engine.keeps_requests = True

    def do(self, command: Advance | Withdraw) -> list[Ended]:
        """One round of every worker; returns the rows that have left. Raises EngineDied where an engine is gone."""
        lanes = self._engine.workers
        if isinstance(command, Withdraw):
            return self._call("withdraw", [(command.keys,)] * lanes)
        # Workers need the tokens alone.
        rows = [row._replace(prompt=row.prompt.tokens) for row in command.rows]
        shares = [[row for row in rows if self._lane(row.key) == lane] for lane in range(lanes)]
        return self._call("advance", [(share, self._sampling, command.steps, command.exactly) for share in shares])

    def restart(self) -> None:
        """Start the engines behind the workers again. Raises the error that makes that impossible."""
        self._call("restart", [()] * self._engine.workers)

    def _lane(self, key: Key) -> int:
        return (key[0] * self._samples + key[1]) % self._engine.workers

    def _call(self, method: str, of_lanes: list[tuple]) -> list[Ended]:
        engine = self._engine
        arguments = {
            slot: (engine.name, method, payload, {}, None) for slot, payload in zip(engine.slots, of_lanes, strict=True)
        }
        answers = engine.executor.call(call_worker, arguments, what=f"{engine.name}.{method}")
        return [ended for slot in engine.slots for ended in answers[slot] or ()]


logger = logging.getLogger(__name__)
RESTARTS = 3
"""Restarts of an engine, without a completion between them, before its end is the run's."""
GRACE = 2.0
"""Seconds that an end waits for calls that may never return: a reward, or any call where the run ends by an error."""


class Driver:
    """To be used from one thread, which trains. Its calls raise the error that another thread failed with."""

    def __init__(
        self,
        engine: Lanes,
        pump: RolloutPump,
        training: TrainingPump,
        score: Callable[[Sequence[Group]], list[list[dict[str, float]]]],
        *,
        talks: Talks | None = None,
        patience: float = 3600.0,
    ) -> None:
        """The threads start at once.

        ``score``: the rewards of each sample of the prompts that wait; calls come one after another, from one thread.
        ``talks``: the environments, where the pump's samples are conversations; they end with the driver.
        ``patience``: seconds without any progress after which a wait fails.
        """
        self.pump, self.training = pump, training
        self.idle = 0.0
        """Seconds in which the engine had nothing to do."""
        self._engine, self._score = engine, score
        self._patience, self._deaths = patience, 0
        self.changed = threading.Condition()
        """Held while the ledger or a pump is read or changed."""
        self._busy, self._closed, self._progress = False, False, 0
        self._error: BaseException | None = None
        # A new thread begins with its own number of threads for torch. An engine in this process would compute with
        # another number than the engine was made with.
        self._threads = torch.get_num_threads()
        self._talks = talks
        self._threads_of = [threading.Thread(target=self._run, name="rl_bridge rollouts", daemon=True)]
        if talks is not None:
            self._threads_of += [threading.Thread(target=self._talk, name="rl_bridge environments", daemon=True)]
        self._rewards = threading.Thread(target=self._reward, name="rl_bridge rewards", daemon=True)
        for thread in (*self._threads_of, self._rewards):
            thread.start()

    def hold(self) -> None:
        """Wait until no row is in the engine, as the pace has it, and none goes in before ``release``."""
        with self.changed:
            self.pump.hold()
            self.changed.notify_all()
            self._wait(lambda: self.pump.held and self.pump.alive and not self._busy, "the rollout to stop")

    def release(self, version: int) -> None:
        """The engine has the weights of ``version``: go on."""
        with self.changed:
            self.pump.release(version)
            self.changed.notify_all()

    def could_update(self) -> bool:
        """Wait until the next step's prompts are ready or the engine has nothing to do; whether it is the latter."""
        with self.changed:
            self._wait(lambda: self._stands() or self.training.batch() is not None, self._prompts())
            return self._stands()

    def take(self) -> list[Group] | None:
        """Wait for the prompts of the next step. None: the engine needs new weights before they can be drawn."""
        with self.changed:
            self._wait(lambda: self.training.batch() is not None or self._starves(), self._prompts())
            return None if self.training.batch() is None else self.training.take()

    def trained(self) -> None:
        """The step has made the next version of the policy."""
        with self.changed:
            self.training.trained()

    def close(self) -> None:
        """End the threads after their present calls. A reward that hangs is left behind, and holds no process.

        All calls are left behind where the caller ends by an error or an interrupt, which is not to wait.
        """
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._talks is not None:
            self._talks.wake()
        until = time.monotonic() + GRACE
        fails = self._error is not None or sys.exc_info()[0] is not None
        for thread in self._threads_of:
            thread.join(max(0.0, until - time.monotonic()) if fails else None)
        self._rewards.join(max(0.0, until - time.monotonic()))

    def _stands(self) -> bool:
        return self.pump.held or (not self._busy and self.pump.idle())

    def _starves(self) -> bool:
        behind = self.pump.version < self.training.step
        return self.pump.alive and not self._busy and (self.pump.held or (behind and self.pump.idle()))

    def _prompts(self) -> str:
        return f"the completions of step {self.training.step}"

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait under the lock. Raises TimeoutError where nothing at all has happened for too long."""
        progress, since = self._progress, time.monotonic()
        while self._error is None and not done():
            if self._closed:
                raise RuntimeError(f"waiting for {what}: the driver is closed")
            if self._progress != progress:
                progress, since = self._progress, time.monotonic()
            if time.monotonic() - since > self._patience:
                raise TimeoutError(f"waited {self._patience:g} s for {what}: {self.pump.ledger.counts()}")
            self.changed.wait(min(self._patience, 1.0))
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while (command := self._next()) is not None:
                self._do(*command)
        except BaseException as error:
            self._fail(error)

    def _next(self) -> tuple[Command, int] | None:
        """The next command and the engine's epoch; None at the end."""
        with self.changed:
            while not self._closed:
                command = self.pump.next(time.monotonic())
                if self._talks is not None and self.pump.has_to_ask:
                    self._talks.wake()
                self._busy = command is not None
                self.changed.notify_all()
                if command is not None:
                    return command, self.pump.epoch
                began = time.monotonic()
                self.changed.wait()
                self.idle += time.monotonic() - began
        return None

    def _do(self, command: Command, epoch: int) -> None:
        """Carry a command out, without the lock, and tell the pump its result."""
        try:
            ended = self._engine.restart() if isinstance(command, Restart) else self._engine.do(command)
        except EngineDied as error:
            self._deaths += 1
            if self._deaths > RESTARTS:
                raise
            logger.warning("the rollout's engine is gone (%s); its requests go to another one", error)
            with self.changed:
                self._busy = False
                self.pump.died(epoch)
            return
        with self.changed:
            self._busy, self._progress = False, self._progress + 1
            if ended is None:
                self.pump.restarted()
                return
            accepted = self.pump.answered(epoch, ended, time.monotonic())
            assert accepted, "nobody else replaces the engine"
            if isinstance(command, Advance) and ended:
                self._deaths = 0

    def _talk(self) -> None:
        """Let environments answer beside everything else."""
        talks = self._talks
        assert talks is not None
        try:
            while self._ask(talks):
                for reply in talks.replies():
                    with self.changed:
                        self._progress += 1
                        if reply.turn is None and reply.reason is None:
                            self.pump.cannot_go_on(reply.key, reply.beginning)
                        else:
                            self.pump.told(*reply)
                        self.changed.notify_all()
        except BaseException as error:
            self._fail(error)
        finally:
            talks.close()

    def _ask(self, talks: Talks) -> bool:
        """Ask the environments whose turn it is; wait until there is one. False: the driver is closed."""
        with self.changed:
            while not (self._closed or self.pump.has_to_ask or talks.busy):
                self.changed.wait()
            for number, place in self.pump.to_ask():
                talks.ask(self.pump.ledger.groups[number], place)
            undrawn = self.pump.ledger.keys(*UNDRAWN)
            talks.keep([(key, self.pump.ledger[key].beginnings) for key in undrawn])
            return not self._closed

    def _reward(self) -> None:
        """Ask for rewards beside everything else."""
        try:
            while groups := self._drawn():
                rewards = self._score(groups)
                with self.changed:
                    for group, of_group in zip(groups, rewards, strict=True):
                        self.pump.scored(group.number, of_group)
                    self._progress += 1
                    self.changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _drawn(self) -> list[Group]:
        """Wait for prompts that are to be scored; none at the end."""
        with self.changed:
            while not self._closed:
                if groups := self.pump.to_score():
                    return groups
                self.changed.wait()
        return []

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self._error = self._error or error
            self._busy = False
            self.changed.notify_all()
