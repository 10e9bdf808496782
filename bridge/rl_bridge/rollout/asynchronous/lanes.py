"""The workers of an ``InferenceEngine`` as the one engine that the rollout pump commands."""

from typing import Protocol

from rl_bridge.data.requests import SamplingParams
from rl_bridge.engines.base import Engine
from rl_bridge.engines.lifecycle import call_worker
from rl_bridge.engines.reviving import Revived
from rl_bridge.rollout.asynchronous.ledger import Key
from rl_bridge.rollout.asynchronous.rollout_pump import Advance, Ended, Withdraw


class Commanded(Protocol):
    """What carries out the commands of a rollout pump, one at a time."""

    def do(self, command: Advance | Withdraw) -> list[Ended]:
        """The rows that have left. Raises EngineDied where the engine is gone, with all that it was drawing."""
        ...

    def restart(self) -> None:
        """Make another engine. Raises what makes that impossible."""
        ...


class Lanes:
    """Each sample has its worker, by its number: the same rows lie beside each other in every run.

    A prompt of the ledger has its token ids as ``tokens``.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, samples: int) -> None:
        """``engine``: of workers that are ``Advancing``; ``samples``: of a prompt, a greedy one among them.

        Raises:
            ValueError: its workers are not.
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
        """One round of every worker."""
        lanes = self._engine.workers
        if isinstance(command, Withdraw):
            return self._call("withdraw", [(command.keys,)] * lanes)
        # Workers need the tokens alone.
        rows = [row._replace(prompt=row.prompt.tokens) for row in command.rows]
        shares = [[row for row in rows if self._lane(row.key) == lane] for lane in range(lanes)]
        return self._call("advance", [(share, self._sampling, command.steps, command.exactly) for share in shares])

    def restart(self) -> None:
        """Start what is behind the workers again."""
        self._call("restart", [()] * self._engine.workers)

    def _lane(self, key: Key) -> int:
        return (key[0] * self._samples + key[1]) % self._engine.workers

    def _call(self, method: str, of_lanes: list[tuple]) -> list[Ended]:
        engine = self._engine
        arguments = {
            slot: (engine.name, method, given, {}, None) for slot, given in zip(engine.slots, of_lanes, strict=True)
        }
        answers = engine.executor.call(call_worker, arguments, what=f"{engine.name}.{method}")
        return [ended for slot in engine.slots for ended in answers[slot] or ()]
