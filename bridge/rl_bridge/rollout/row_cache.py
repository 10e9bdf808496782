"""A cache of keys and values whose rows have lengths of their own.

Tokens are written where their row says, so a row of 5 tokens stands beside one of 500 without padding on its left. Rows
and room a row grow by doubling.
"""

import torch
from transformers import Cache


class RowCache(Cache):
    """Keys and values of each layer, [rows, heads, capacity, D]: what attention reads of a head lies in one piece.

    A model's call either reads prompts (``reading``) or adds one token to each of the first rows (``adding``).
    """

    def __init__(self) -> None:
        """Layers are made as the model first writes to them."""
        super().__init__(layers=[])
        self.rows = self.capacity = 0
        self._stored: list[list[torch.Tensor]] = []
        self._source = self._rows = self._columns = torch.empty(0, dtype=torch.int64)
        self._present = (0, 0)
        self._places: dict[int, torch.Tensor] = {}

    def reserve(self, rows: int, capacity: int) -> None:
        """Room for at least so many rows of at least so many tokens; what is there stays."""
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        capacity = self.capacity if capacity <= self.capacity else max(capacity, 2 * self.capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        for stored in self._stored:
            for n, old in enumerate(stored):
                # Zeros, since a probability of 0 does not silence a NaN in memory that nobody wrote.
                stored[n] = old.new_zeros((rows, old.shape[1], capacity, old.shape[3]))
                stored[n][: self.rows, :, : self.capacity] = old
        self.rows, self.capacity = rows, capacity

    def reading(self, source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Of the next call's tokens, rows of the batch one behind another, ``source[i]`` goes to this row and column.

        The layers see the tokens of that call alone. One token may go to several rows.
        """
        self._source, self._rows, self._columns, self._present, self._places = source, rows, columns, (0, 0), {}

    def adding(self, columns: torch.Tensor, used: int) -> None:
        """The next call adds a token to each of the first rows, at these columns; layers see ``used`` columns."""
        self._rows, self._columns = torch.arange(len(columns), device=columns.device), columns
        self._present, self._places = (len(columns), used), {}

    def move(self, to: torch.Tensor, rows: torch.Tensor, used: int) -> None:
        """Copy rows, of which ``used`` columns matter, to other places."""
        for stored in self._stored:
            for values in stored:
                values[to, :, :used] = values[rows, :, :used]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the call's keys and values [N, heads, T, D] of a layer; returns those that its queries see."""
        both = key_states, value_states
        while len(self._stored) <= layer_idx:
            self._stored.append([])
        stored = self._stored[layer_idx]
        if not stored:
            stored.extend(x.new_zeros((self.rows, x.shape[1], self.capacity, x.shape[3])) for x in both)
        rows, used = self._present
        places = self._of_heads(key_states.shape[1])
        for values, new in zip(stored, both, strict=True):
            tokens = new.transpose(1, 2).flatten(0, 1)
            tokens = tokens if rows else tokens[self._source]
            values.view(-1, values.shape[3]).index_copy_(0, places, tokens.flatten(0, 1))
        if not rows:
            return both
        keys, values = (x[:rows, :, :used] for x in stored)
        return keys, values

    def _of_heads(self, heads: int) -> torch.Tensor:
        """Where the heads of the call's tokens lie, of a layer's [rows · heads · capacity]; the same for all layers."""
        if heads not in self._places:
            head = self._rows[:, None] * heads + torch.arange(heads, device=self._rows.device)
            self._places[heads] = (head * self.capacity + self._columns[:, None]).flatten()
        return self._places[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the present call's come after, at most."""
        return max(0, self._present[1] - 1)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the present call's queries see, from the first."""
        return (self._present[1] or query_length), 0
