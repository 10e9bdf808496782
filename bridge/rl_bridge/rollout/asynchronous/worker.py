"""The methods of a rollout worker that the rollout pump calls: rounds of a decoder whose rows stay between calls."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch

from rl_bridge.data.requests import SamplingParams
from rl_bridge.engines.results import returns
from rl_bridge.rollout.asynchronous.ledger import Key, Tokens
from rl_bridge.rollout.asynchronous.rollout_pump import Ended, Row


class EngineDied(RuntimeError):
    """The engine behind a worker is gone, and what it was drawing is unknown. The worker may be able to restart it."""


class Advancing:
    """What a worker with a decoder can do besides: draw for a while, and give back what is not finished.

    The decoder needs ``withdraw(keys)`` besides ``add`` and ``step``. Weights change only when no row is left; then
    rows go in again with their tokens so far, so that what a version draws is exactly its own.
    """

    engine_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """What a step of the decoder raises when the engine behind it is gone."""
    _advancing: Any = None
    _advancing_version = -1

    @abstractmethod
    def decoder(self, sampling: SamplingParams) -> Any:
        """An empty decoder with the weights as they are."""

    @abstractmethod
    def weights_version(self) -> int:
        """The version of the weights in use."""

    @returns("local")
    @torch.no_grad()
    def advance(self, rows: Sequence[Row], sampling: SamplingParams, steps: int) -> list[Ended]:
        """Put ``rows`` in, then draw up to ``steps`` tokens for every row; those that ended.

        A row's prompt is token ids.

        Raises:
            EngineDied: there is no engine any more.
        """
        decoder, version = self._advancing, self.weights_version()
        if decoder is None or not (decoder.running or decoder.waiting):
            decoder, self._advancing_version = self.decoder(sampling), version
            self._advancing = decoder
        assert version == self._advancing_version, (
            f"weights changed from version {self._advancing_version} to {version} under rows that are being drawn"
        )
        # Prompts of similar length go together: a step costs as much as its longest row.
        for row in sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens)):
            tokens = [*row.prompt, *row.tokens]
            decoder.add(
                row.key, tokens, seed=row.seed, drawn=row.drawn, limit=row.limit, said=row.said, greedy=row.greedy
            )
        ended = []
        for _ in range(steps):
            if not (decoder.running or decoder.waiting):
                break
            try:
                ended += [_ended(drawn, drawn.reason) for drawn in decoder.step()]
            except self.engine_errors as error:
                raise EngineDied(f"{type(error).__name__}: {error}") from error
        return ended

    @returns("local")
    def withdraw(self, keys: Collection[Key]) -> list[Ended]:
        """Take these rows out unfinished. Rows of other workers may be among ``keys``."""
        if self._advancing is None:
            return []
        return [_ended(drawn, None) for drawn in self._advancing.withdraw(keys)]

    @returns("local")
    def restart(self) -> None:
        """Forget all rows, and start what they ran in again if that is gone. Its weights are the source's then."""
        self._advancing = None


def _ended(drawn: Any, reason: str | None) -> Ended:
    return Ended(drawn.key, Tokens(drawn.tokens, drawn.logprobs, drawn.allowed), reason)
