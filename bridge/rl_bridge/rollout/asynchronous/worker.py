"""The methods of a rollout worker that the rollout pump calls: rounds of a decoder whose rows stay between calls."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch

from rl_bridge.data.requests import SamplingParams
from rl_bridge.engines.results import returns
from rl_bridge.rollout.asynchronous.ledger import Key, Tokens
from rl_bridge.rollout.asynchronous.rollout_pump import Ended, Row

NOTHING = Tokens([], [], None)


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
    _stop: Any
    """Ids that end a completion, or a turn."""

    @abstractmethod
    def decoder(self, sampling: SamplingParams) -> Any:
        """An empty decoder with the weights as they are."""

    @abstractmethod
    def weights_version(self) -> int:
        """The version of the weights in use."""

    @returns("local")
    @torch.no_grad()
    def advance(self, rows: Sequence[Row], sampling: SamplingParams, steps: int, exactly: bool = False) -> list[Ended]:
        """Put ``rows`` in, then draw up to ``steps`` tokens for every row; those that ended.

        A row's prompt is token ids. ``exactly``: an engine that draws on by itself stops every row after ``steps``.

        Raises:
            EngineDied: there is no engine any more.
            ValueError: a row went on behind its stop token, in a checkpoint of an older version.
        """
        decoder, version = self._advancing, self.weights_version()
        if decoder is None or not (decoder.running or decoder.waiting):
            decoder, self._advancing_version = _begun(self.decoder(sampling), exactly), version
            self._advancing = decoder
        assert version == self._advancing_version, (
            f"weights changed from version {self._advancing_version} to {version} under rows that are being drawn"
        )
        # Prompts of similar length go together: a step costs as much as its longest row.
        ended = [Ended(row.key, NOTHING, "stop") for row in rows if _has_stopped(row, self._stop)]
        over = {row.key for row in ended}
        for row in sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens)):
            if row.key in over:
                continue
            tokens = [*row.prompt, *row.tokens]
            decoder.add(
                row.key, tokens, seed=row.seed, drawn=row.drawn, limit=row.limit, said=row.said, greedy=row.greedy
            )
        try:
            return ended + [_ended(drawn) for drawn in _drawn(decoder, steps)]
        except self.engine_errors as error:
            raise EngineDied(f"{type(error).__name__}: {error}") from error

    @returns("local")
    def withdraw(self, keys: Collection[Key]) -> list[Ended]:
        """Take these rows out; unfinished, but for those that ended since the last look.

        Rows of other workers may be among ``keys``.
        """
        if self._advancing is None:
            return []
        return [_ended(drawn) for drawn in self._advancing.withdraw(keys)]

    @returns("local")
    def restart(self) -> None:
        """Forget all rows, and start what they ran in again if that is gone. Its weights are the source's then."""
        self._advancing = None


def _begun(decoder: Any, exactly: bool) -> Any:
    if exactly and hasattr(decoder, "draw_in_rounds"):
        decoder.draw_in_rounds()
    return decoder


def _drawn(decoder: Any, steps: int) -> list[Any]:
    if getattr(decoder, "in_rounds", False):
        return decoder.round(steps)
    # A step of an engine in this process is one token of every row.
    ended = []
    for _ in range(steps):
        if not (decoder.running or decoder.waiting):
            break
        ended += decoder.step()
    return ended


def _ended(drawn: Any) -> Ended:
    return Ended(drawn.key, Tokens(drawn.tokens, drawn.logprobs, drawn.allowed), _reason(drawn.reason))


def _reason(of_decoder: str) -> str | None:
    """A server draws between two commands: a row that is withdrawn may have ended, and must not be put in again."""
    return None if of_decoder == "abort" else of_decoder


def _has_stopped(row: Row, stop: Collection[int]) -> bool:
    """Whether a row's last token is its end: older checkpoints have such rows of servers among the unfinished."""
    said = row.tokens[len(row.tokens) - row.said :]
    place = next((place for place, token in enumerate(said) if token in stop), None)
    if place is not None and place + 1 < len(said):
        raise ValueError(
            f"sample {row.key[1]} of prompt {row.key[0]} has {len(said) - place - 1} tokens behind its stop token "
            f"{said[place]}: an older version drew on there and wrote it to the checkpoint. Resume from a checkpoint "
            "before that, or begin the run anew"
        )
    return place is not None
