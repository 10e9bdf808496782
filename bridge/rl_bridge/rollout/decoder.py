"""The protocol of decoders: rows of any length that join and leave between steps, each drawing one token a step.

``CachedDecoder`` computes in this process, ``VLLMDecoder`` asks an engine of vLLM, ``ServedDecoder`` asks a server.
"""

from abc import abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol


class Drawn(NamedTuple):
    """A row that left a decoder: the tokens drawn since ``add``, with the one that ended the row."""

    key: Any
    """The key given to ``add``."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Under the distribution that the tokens were drawn from."""
    allowed: Sequence[Sequence[int]] | None
    """Ids that the truncated sampler allowed for each token, rising; None where nothing was truncated."""
    reason: Literal["stop", "length", "abort"]
    """ "abort": the row was withdrawn."""
    versions: Sequence[int] | None = None
    """Version of the weights that drew each token. None: one version for all, known to the maker of the decoder."""


class Decoder(Protocol):
    """Draws tokens for many sequences at once, with one ``SamplingParams`` and one set of ends.

    A token depends on its row's tokens, seed and number; the rows beside it change its log-probability by a rounding
    of the engine's arithmetic at most.
    """

    @property
    @abstractmethod
    def running(self) -> int:
        """Rows that were added and have not been returned, without those in ``waiting``."""
        ...

    @property
    def waiting(self) -> int:
        """Rows that were added and not read yet; 0 where rows wait in the engine's own queue."""
        return 0

    @abstractmethod
    def add(
        self,
        key: Hashable,
        tokens: Sequence[int],
        *,
        seed: int,
        drawn: int = 0,
        limit: int,
        said: int = 0,
        greedy: bool = False,
    ) -> None:
        """Put a sequence in: a step that has room reads it and draws its first token.

        Args:
            key: the row's name in ``Drawn``.
            tokens: the sequence so far.
            seed: 64 bits, int64: with ``drawn`` it decides the random numbers.
            drawn: tokens that the policy has drawn already in this sequence, which is the number of its next draw.
            limit: tokens that the row may draw until it ends. A row that fills the engine's longest sequence, or the
                model's positions, ends by "length" before.
            said: how many of the last tokens belong to the completion that goes on here: stop texts may begin there.
            greedy: the row draws the most likely tokens, however the others are sampled.

        Raises:
            ValueError: for no tokens, a limit below 1, or a sequence that is longer than the engine or the model holds.
        """
        ...

    @abstractmethod
    def step(self) -> Sequence[Drawn]:
        """Draw a token for every running row, or wait a moment for a server that draws by itself.

        Returns the rows that ended.
        """
        ...

    @abstractmethod
    def withdraw(self, keys: Collection[Hashable] | None = None) -> Sequence[Drawn]:
        """Take rows out unfinished, all or those of ``keys``, with the tokens that they have drawn since ``add``.

        A row that has ended and was not returned yet comes back with its own reason.
        """
        ...

    def draw_in_rounds(self) -> None:
        """From now on draw in ``round`` alone, so that tokens depend on no time. No effect where only steps draw."""

    def round(self, tokens: int) -> Sequence[Drawn]:
        """Draw up to ``tokens`` tokens of every row; returns the rows that ended."""
        ended: list[Drawn] = []
        for _ in range(tokens):
            if not (self.running or self.waiting):
                break
            ended += self.step()
        return ended

    def count_tokens(self) -> None:
        """Keep ``unfinished_tokens`` up to date from now on."""

    @property
    @abstractmethod
    def unfinished_tokens(self) -> int:
        """Tokens of the rows that have not ended."""
        ...


def check_row(
    tokens: Sequence[int], *, limit: int, drawn: int, longest: int | None = None, vocabulary: int | None = None
) -> None:
    """Refuse a row that no decoder can draw.

    ``longest``: tokens of a sequence that the engine holds. ``vocabulary``: so many tokens the model knows.

    Raises:
        ValueError: with the numbers.
    """
    if not tokens or limit < 1 or drawn < 0:
        raise ValueError(
            f"a row needs tokens, limit ≥ 1 and drawn ≥ 0, got {len(tokens)} tokens, limit {limit}, drawn {drawn}"
        )
    if longest is not None and len(tokens) >= longest:
        raise ValueError(
            f"a sequence of {len(tokens)} tokens leaves no room for one more: the engine holds {longest} "
            "(max_model_len, or the model's positions)"
        )
    if vocabulary is not None and (min(tokens) < 0 or max(tokens) >= vocabulary):
        strange = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(f"{strange} is no token of the model, which knows those from 0 to {vocabulary - 1}")
