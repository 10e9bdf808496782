"""A model without a cache, as a decoder calls one: every token of a row is read again for each new one.

Models of a class of the user's own give logits of whole rows and keep nothing between two calls.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_bridge.parallel.attention.register import NAME
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.rollout.cached_model import Arrangement


class UncachedModel:
    """The logits after the last token of rows that have lengths of their own, with the calls of ``CachedModel``.

    Rows are padded on the right, where a causal model does not look; no call has more tokens than ``read_tokens``, or
    one row, because each of its tokens has logits of the whole vocabulary.
    """

    def __init__(self, model: GivesLogits, read_tokens: int) -> None:
        self._model, self._read_tokens = model, read_tokens
        self._tokens = torch.zeros((0, 0), dtype=torch.int64, device=model.device)

    @property
    def arrangement(self) -> Arrangement:
        """The only one there is: rows that are padded."""
        return Arrangement(NAME, read_packed=False)

    def read(self, sequences: Sequence[Sequence[int]], of_rows: Sequence[int], first: int, room: int) -> Tensor:
        """Logits [rows, V] of new rows after their sequences, whose numbers are ``of_rows``; each is computed once."""
        self._reserve(first + len(of_rows), room)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._tokens.device)
        padded = self._tokens.new_zeros((len(sequences), int(lengths.max())))
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence)] = row.new_tensor(sequence)
        places = torch.tensor(of_rows, device=padded.device)
        self._tokens[first : first + len(of_rows), : padded.shape[1]] = padded[places]
        return self._last(padded, lengths)[places]

    def add(self, tokens: Tensor, columns: Tensor, lengths: Sequence[int]) -> Tensor:
        """Logits [B, V] after one more token of each of the first B rows, at these columns.

        ``lengths``: of the rows with the token.
        """
        self._reserve(len(lengths), max(lengths))
        self._tokens[torch.arange(len(lengths), device=tokens.device), columns] = tokens
        return self._last(self._tokens[: len(lengths), : max(lengths)], columns + 1)

    def move(self, to: Sequence[int], rows: Sequence[int], used: int) -> None:
        """Copy rows to the places of others."""
        self._tokens[torch.tensor(to, device=self._tokens.device)] = self._tokens[
            torch.tensor(rows, device=self._tokens.device)
        ]

    def _last(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits [rows, V] at the last token of each row. Rows of about one length share a call."""
        order = lengths.argsort()
        parts = []
        for part in self._parts(lengths[order].tolist()):
            rows = order[part]
            width = int(lengths[rows].max())
            logits = self._model(input_ids=tokens[rows, :width]).logits
            parts.append(logits[torch.arange(len(rows), device=rows.device), lengths[rows] - 1])
        return torch.cat(parts)[order.argsort()]

    def _parts(self, lengths: Sequence[int]) -> Iterator[slice]:
        """Slices of rising lengths, each of at most ``read_tokens`` tokens with padding, or of one row."""
        start = 0
        for stop in range(1, len(lengths) + 1):
            if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > self._read_tokens:
                yield slice(start, stop)
                start = stop

    def _reserve(self, rows: int, capacity: int) -> None:
        """Room for at least so many rows of at least so many tokens; what is there stays."""
        before = self._tokens
        if rows <= before.shape[0] and capacity <= before.shape[1]:
            return
        # Doubled, so that a row that grows by a token a step is not copied in each.
        wider = before.shape[1] if capacity <= before.shape[1] else max(capacity, 2 * before.shape[1])
        self._tokens = before.new_zeros((max(rows, before.shape[0]), wider))
        self._tokens[: before.shape[0], : before.shape[1]] = before
