"""The ``Decoder`` of a served engine: rows that join and leave, each one request or, with stop texts, several."""

import weakref
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_bridge.data.requests import SamplingParams
from rl_bridge.rollout.decoder import Drawn
from rl_bridge.rollout.served.asking import Completion
from rl_bridge.rollout.served.engine import ServedEngine
from rl_bridge.rollout.stop_texts import CompletionText, StopTexts

PIECE = 64
"""Tokens of one request of a row that a text or a budget of tokens may end: what is drawn behind that is lost."""


@dataclass
class _Row:
    key: Hashable
    prompt: tuple[int, ...]
    seed: int
    drawn: int
    limit: int
    text: CompletionText | None
    sampling: SamplingParams
    had: list[Completion] = field(default_factory=list)
    """What the requests so far drew."""

    @property
    def tokens(self) -> list[int]:
        return [token for completion in self.had for token in completion.tokens]


class ServedDecoder:
    """``rl_bridge.rollout.decoder.Decoder`` over a served engine, which decides itself what runs together."""

    def __init__(
        self,
        engine: ServedEngine,
        sampling: SamplingParams,
        *,
        stop: Collection[int],
        texts: StopTexts | None = None,
    ) -> None:
        """``stop``, ``texts``: ids and texts that end a row. Rows that nobody takes are aborted with this object."""
        self._engine, self._sampling, self._stop = engine, sampling, frozenset(stop)
        self._texts = texts or None
        self._pieces = self._texts is not None
        self._paused: list[_Row] = []
        self.in_rounds = False
        self._rows: dict[str, _Row] = {}
        weakref.finalize(self, engine.forget, self._rows)

    @property
    def running(self) -> int:
        """Rows that were added and have not been returned."""
        return len(self._rows) + len(self._paused)

    @property
    def waiting(self) -> int:
        """None: the engine's own queue holds what it has no room for."""
        return 0

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
        """Put a sequence in, as ``Decoder.add`` does.

        Raises:
            ValueError: for no tokens, a limit below 1, or a sequence that the engine cannot hold.
        """
        longest = self._engine.limits().longest
        if not tokens or limit < 1 or drawn < 0 or len(tokens) >= longest:
            raise ValueError(
                f"a row needs 1 to {longest - 1} tokens (max_model_len), limit ≥ 1 and drawn ≥ 0, got {len(tokens)} "
                f"tokens, limit {limit}, drawn {drawn}"
            )
        text = None if self._texts is None else self._texts.begin(tokens[len(tokens) - said :])
        sampling = self._sampling.greedily() if greedy else self._sampling
        self._go_on(_Row(key, tuple(tokens), seed, drawn, min(limit, longest - len(tokens)), text, sampling))

    def step(self) -> list[Drawn]:
        """The rows that have ended; waits a moment for one."""
        return self._drawn(self._engine.take(self._rows, 0.02))

    def draw_in_rounds(self) -> None:
        """From now on the engine draws in ``round`` alone, so that what is drawn depends on no time."""
        self.in_rounds = True

    def round(self, tokens: int) -> list[Drawn]:
        """Draw so many tokens of every row, or up to its end; the rows that have ended. The engine has none of them."""
        rows, self._paused = self._paused, []
        for row in rows:
            self._ask(row, tokens)
        ended = []
        while self._rows:
            ended += self._drawn(self._engine.take(self._rows, 0.02))
        return ended

    def count_tokens(self) -> None:
        """Let ``unfinished_tokens`` be known while rows are drawn: piece by piece."""
        self._pieces = True

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of the rows that have not ended, up to their last whole piece."""
        return sum(len(row.tokens) for row in (*self._rows.values(), *self._paused))

    def withdraw(self, keys: Collection[Hashable] | None = None) -> list[Drawn]:
        """Take rows out unfinished, all or those of ``keys``, with what they have drawn since they were added."""
        names = [name for name, row in self._rows.items() if keys is None or row.key in keys]
        out = [row for row in self._paused if keys is None or row.key in keys]
        self._paused = [row for row in self._paused if not (keys is None or row.key in keys)]
        drawn = self._drawn(self._engine.withdraw(names), leave=True)
        return drawn + [_whole(row, "abort") for row in out]

    def _go_on(self, row: _Row) -> None:
        if self.in_rounds:
            self._paused.append(row)
        else:
            self._ask(row, PIECE if self._pieces else None)

    def _ask(self, row: _Row, most: int | None) -> None:
        """The next request of a row, of at most so many tokens."""
        had = row.tokens
        limit = row.limit - len(had)
        name = self._engine.submit(
            (*row.prompt, *had),
            row.sampling,
            seed=row.seed,
            drawn=row.drawn + len(had),
            limit=limit if most is None else min(limit, most),
            stop=self._stop,
        )
        self._rows[name] = row

    def _drawn(self, found: dict[str, Completion], *, leave: bool = False) -> list[Drawn]:
        """Rows that have ended, or all: where a text is complete, up to and with the token that completed it."""
        made = []
        for name, completion in found.items():
            row, reason = self._rows.pop(name), completion.reason
            for place, token in enumerate(completion.tokens if row.text is not None else (), 1):
                if row.text is not None and row.text.add(token) is not None:
                    completion, reason = _first(completion, place), "stop"
                    break
            row.had.append(completion)
            if reason == "length" and len(row.tokens) < row.limit:
                if not leave:
                    self._go_on(row)
                    continue
                reason = "abort"
            made.append(_whole(row, reason))
        return made


def _whole(row: _Row, reason: Literal["stop", "length", "abort"]) -> Drawn:
    """A row that leaves, with what all its requests drew."""
    parts = row.had
    allowed = [ids for part in parts for ids in part.allowed or ()]
    versions = [version for part in parts for version in part.versions or ()]
    logprobs = [value for part in parts for value in part.logprobs]
    unsaid = any(part.tokens and part.versions is None for part in parts)
    return Drawn(row.key, row.tokens, logprobs, allowed or None, reason, None if unsaid else versions)


def _first(completion: Completion, count: int) -> Completion:
    """Its first ``count`` tokens, with what is known of them."""
    allowed = None if completion.allowed is None else completion.allowed[:count]
    versions = None if completion.versions is None else completion.versions[:count]
    return Completion(completion.tokens[:count], completion.logprobs[:count], allowed, versions, completion.reason)
