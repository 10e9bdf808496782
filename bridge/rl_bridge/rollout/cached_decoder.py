"""The ``Decoder`` of a model in this process: its keys and values are in one cache, whose rows join and leave."""

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.row_checks import positions_of, rotary_bound
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.rollout.cached_model import Arrangement, CachedModel
from rl_bridge.rollout.decoder import Decoder, Drawn, check_row
from rl_bridge.rollout.sampling import CompletionText, StopTexts, draw
from rl_bridge.rollout.uncached_model import UncachedModel
from rl_kernels.sampling import Workspace


@dataclass
class _Row:
    key: Hashable
    prompt: tuple[int, ...]
    seed: int
    drawn: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    allowed: list[array] = field(default_factory=list)
    text: CompletionText | None = None
    """The text so far, which is searched for stop texts."""
    greedy: bool = False
    stopped: bool = False


class CachedDecoder(Decoder):
    """Draws tokens for many sequences at once, one for every running row in each step.

    A token depends on its row's tokens, seed and number alone, not on the rows beside it.

    >>> decoder = CachedDecoder(model, SamplingParams(max_new_tokens=8), stop=[1])  # doctest: +SKIP
    >>> decoder.add("first", [5, 6, 7], seed=1, limit=8)  # doctest: +SKIP
    >>> while decoder.running or decoder.waiting:  # doctest: +SKIP
    ...     for drawn in decoder.step():
    ...         print(drawn.key, drawn.tokens, drawn.reason)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: SamplingParams,
        *,
        stop: Iterable[int],
        texts: StopTexts | None = None,
        max_rows: int = 1024,
        read_tokens: int = 8192,
        arrangement: Arrangement | None = None,
    ) -> None:
        """Make an empty decoder; nothing is computed yet.

        Args:
            model: a causal LM with a cache of transformers' kind: attention, full or with windows, convolutions,
                linear attention, state spaces. A class of the user's own has no cache: each token of a row is read
                again for every new one.
            sampling: temperature and truncation; the number of tokens is ``add``'s.
            stop: ids that end a row when they are drawn.
            texts: texts that end a row when they are complete.
            max_rows: rows that run together; others wait. The limit bounds the memory of keys and values.
            read_tokens: tokens of added sequences that one forward pass reads, or one sequence.
            arrangement: the one that ``check_decoder(model)`` found to be right; None: the one of the model's layers.

        Raises:
            NotImplementedError: for a model that has no such cache.
            ValueError: for no rows or no tokens.
        """
        if max_rows < 1 or read_tokens < 1:
            raise ValueError(f"max_rows and read_tokens must be ≥ 1, got {max_rows} and {read_tokens}")
        self._model = (
            UncachedModel(model, read_tokens) if isinstance(model, GivesLogits) else CachedModel(model, arrangement)
        )
        self._sampling, self._stop = sampling, frozenset(stop)
        self._texts = texts or None
        self._max_rows, self._read_tokens = max_rows, read_tokens
        self._bound, self._positions, self._name = rotary_bound(model), positions_of(model), type(model).__name__
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        # Of each running row: seed, number of its next draw, tokens in the cache, last token.
        self._state = torch.empty((4, 0), dtype=torch.int64, device=model.device)
        self._work = Workspace()

    @property
    def arrangement(self) -> Arrangement:
        """Which rows share a call of the model."""
        return self._model.arrangement

    @property
    def running(self) -> int:
        """Rows that have a place in the cache."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Rows that were added and have not been read yet."""
        return len(self._waiting)

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
        """Put a sequence in, as ``Decoder.add`` does. Equal sequences that are read in one step are computed once.

        Raises:
            ValueError: for no tokens, one that the model does not know, a limit below 1, as many tokens as the model
                has positions, or a row that could become longer than the model's rotary frequencies hold for
                (``rl_bridge.models.row_checks``).
        """
        check_row(tokens, limit=limit, drawn=drawn, longest=self._positions, vocabulary=self._vocabulary)
        if self._bound is not None and len(tokens) + limit > self._bound:
            raise ValueError(
                f"a row of {len(tokens)} tokens that may draw {limit} more can be longer than {self._bound} tokens, "
                f"from where on {self._name} changes the rotary frequencies of all rows of a call: take shorter "
                "prompts, or a smaller max_new_tokens (max_tokens of conversations)"
            )
        if self._positions is not None:
            limit = min(limit, self._positions - len(tokens))
        row = _Row(key, tuple(tokens), seed, drawn, limit, greedy=greedy)
        if self._texts is not None:
            row.text = self._texts.begin(tokens[len(tokens) - said :])
        self._waiting.append(row)

    @torch.no_grad()
    def step(self) -> list[Drawn]:
        """Draw one token for every running row; then read waiting rows into the free places, and draw their first.

        Returns the rows that ended, which have left.

        Raises:
            ValueError: for logits that are no numbers.
        """
        ended = []
        if self._rows:
            _, _, lengths, last = self._state
            logits = self._model.add(last, lengths, [len(row.prompt) + len(row.tokens) for row in self._rows])
            self._state[2] += 1
            ended += self._draw(logits, 0)
        while self._waiting and len(self._rows) < self._max_rows:
            before = len(self._rows)
            ended += self._draw(self._read(), before)
        return ended

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of the rows that have not ended."""
        return sum(len(row.tokens) for row in self._rows)

    def withdraw(self, keys: Collection[Hashable] | None = None) -> list[Drawn]:
        """Take rows out unfinished, all or those of ``keys``, with the tokens that they have drawn since ``add``."""
        out = [row for row in self._waiting if keys is None or row.key in keys]
        self._waiting = deque(row for row in self._waiting if not (keys is None or row.key in keys))
        chosen = [place for place, row in enumerate(self._rows) if keys is None or row.key in keys]
        out += self._leave(chosen) if chosen else []
        return [Drawn(row.key, row.tokens, row.logprobs, row.allowed or None, "abort") for row in out]

    def _read(self) -> torch.Tensor:
        """Let waiting rows join, as many as one pass reads; returns logits [rows, V] after their sequences."""
        first, sequences, places, budget = len(self._rows), {}, [], self._read_tokens
        while self._waiting and len(self._rows) < self._max_rows:
            prompt = self._waiting[0].prompt
            if prompt not in sequences:
                if sequences and len(prompt) > budget:
                    break
                sequences[prompt] = len(sequences)
                budget -= len(prompt)
            places.append(sequences[prompt])
            self._rows.append(self._waiting.popleft())
        joined = self._rows[first:]
        state = [(row.seed, row.drawn, len(row.prompt), 0) for row in joined]
        self._state = torch.cat([self._state, self._state.new_tensor(state).T], 1)
        room = max(len(row.prompt) + min(row.limit, 32) for row in joined)
        return self._model.read(list(sequences), places, first, room)

    def _draw(self, logits: torch.Tensor, first: int) -> list[Drawn]:
        """Draw a token for all rows from ``first`` on; returns those that ended, which have left."""
        state = self._state[:, first:]
        rows = self._rows[first:]
        with self._work:
            sampled = draw(logits, state[0], state[1], self._sampling)
        if greedy := [place for place, row in enumerate(rows) if row.greedy]:
            most_likely = draw(logits[greedy], state[0, greedy], state[1, greedy], self._sampling.greedily())
            sampled.tokens[greedy], sampled.logprobs[greedy] = most_likely.tokens, most_likely.logprobs
        state[1] += 1
        state[3] = sampled.tokens
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        if tokens and min(tokens) < 0:
            raise ValueError(f"the model's logits are no numbers after the tokens of {self._rows[first].key}")
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = token in self._stop or (row.text is not None and row.text.add(token) is not None)
        if sampled.allowed_tokens is not None:
            ids, counts = sampled.allowed_tokens.cpu().numpy(), sampled.allowed_count.tolist()
            for row, allowed, count in zip(rows, ids, counts, strict=True):
                if not row.greedy:
                    row.allowed.append(array("i"))
                    row.allowed[-1].frombytes(allowed[:count].view("uint8"))
        ended = [n for n, row in enumerate(rows, first) if row.stopped or len(row.tokens) == row.limit]
        return [self._drawn(row) for row in self._leave(ended)] if ended else []

    def _leave(self, ended: list[int]) -> list[_Row]:
        """Take ended rows out; rows from the end of the cache move to their places. Returns the ended rows."""
        leaving, left = set(ended), len(self._rows) - len(ended)
        movers = [place for place in range(left, len(self._rows)) if place not in leaving]
        gaps = [place for place in ended if place < left]
        rows = [self._rows[place] for place in ended]
        order = list(range(left))
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        self._rows = [self._rows[place] for place in order]
        if movers:
            used = max(len(self._rows[gap].prompt) + len(self._rows[gap].tokens) for gap in gaps)
            self._model.move(gaps, movers, used)
            self._state = self._state[:, torch.tensor(order, device=self._state.device)]
        else:
            self._state = self._state[:, :left]
        return rows

    def _drawn(self, row: _Row) -> Drawn:
        reason = "stop" if row.stopped else "length"
        return Drawn(row.key, row.tokens, row.logprobs, row.allowed or None, reason)
