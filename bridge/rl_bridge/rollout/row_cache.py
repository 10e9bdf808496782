"""A cache whose rows have lengths of their own: keys and values of their tokens, and the states of layers without them.

Tokens are written where their row says, so a row of 5 tokens stands beside one of 500 without padding on its left. Rows
and room a row grow by doubling.
"""

from typing import Any, Literal

import torch
from torch.nn.functional import pad
from transformers import Cache

Stored = Literal["keys", "values", "index"]
"""Tensors that a layer keeps of tokens."""
Kind = Literal["conv", "recurrent"]
"""States that a layer keeps of rows."""


class RowCache(Cache):
    """The tensors that a model keeps of its rows.

    A call of the model either reads sequences (``reading``) or adds one token to rows (``adding``).

    - Each layer of attention has keys, values and keys of an index, [rows, heads, capacity, D]: the part of a head that
      attention reads lies in one piece.
    - Each layer of convolution, linear attention or state space has its states, [rows, …].
    """

    def __init__(self) -> None:
        """Layers are made as the model first writes to them."""
        super().__init__(layers=[])
        self.layers: list[RowLayer] = []
        self.rows = self.capacity = 0
        self.written = 0
        """Layers of attention that the present call has written to."""
        self.mixed = False
        """Whether the present call had states of several sequences in one row, which are of no use."""
        self._source = self._rows = self._columns = torch.empty(0, dtype=torch.int64)
        self._sequences: torch.Tensor | None = None
        self._of: int | torch.Tensor | None = None  # rows that get a token: the first so many, or these
        self._used = 0
        self._offsets: torch.Tensor | None = None
        self._places: dict[int, torch.Tensor] = {}
        self._borrowed: dict[tuple[RowLayer, Kind, int], torch.Tensor] = {}

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps states."""
        return any(layer.states for layer in self.layers)

    def reserve(self, rows: int, capacity: int) -> None:
        """Room for at least so many rows of at least so many tokens; what is there stays."""
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        capacity = self.capacity if capacity <= self.capacity else max(capacity, 2 * self.capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        for layer in self.layers:
            for name, old in layer.tokens.items():
                # Zeros, since a probability of 0 does not silence a NaN in memory that nobody wrote.
                layer.tokens[name] = old.new_zeros((rows, old.shape[1], capacity, old.shape[3]))
                layer.tokens[name][: self.rows, :, : self.capacity] = old
            for key, old in layer.states.items():
                layer.states[key] = old.new_zeros((rows, *old.shape[1:]))
                layer.states[key][: self.rows] = old
        self.rows, self.capacity = rows, capacity

    def reading(
        self, source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, states: torch.Tensor | None
    ) -> None:
        """Announce a call that reads sequences: its token ``source[i]`` goes to row ``rows[i]``, column ``columns[i]``.

        Tokens are numbered with the rows of the batch one behind another. The layers see the tokens of that call alone.
        One token may go to several rows. The states of row ``states[i, 0]`` of the batch go to row ``states[i, 1]``
        here; None: a row of the batch holds several sequences.
        """
        self._source, self._rows, self._columns, self._sequences = source, rows, columns, states
        self._begin(None, 0)

    def adding(
        self, rows: int | torch.Tensor, columns: torch.Tensor, used: int, offsets: torch.Tensor | None = None
    ) -> None:
        """The next call adds a token to the first ``rows`` rows, or to these, at these columns.

        Its layers get ``used`` columns. ``offsets`` are the tokens before each row's, [N], by which the model makes its
        masks; None: ``used`` − 1. ``finish`` ends the call.
        """
        self._rows = torch.arange(rows, device=columns.device) if isinstance(rows, int) else rows
        self._columns, self._sequences = columns, None
        self._begin(rows, used, offsets)

    def _begin(self, of: int | torch.Tensor | None, used: int, offsets: torch.Tensor | None = None) -> None:
        self._of, self._used, self._offsets, self._places, self._borrowed = of, used, offsets, {}, {}
        self.written, self.mixed = 0, False

    def finish(self) -> None:
        """Write back the states that a call with chosen rows has changed."""
        for (layer, kind, number), state in self._borrowed.items():
            layer.states[kind, number][self._of] = state
        self._borrowed = {}

    def move(self, to: torch.Tensor, rows: torch.Tensor, used: int) -> None:
        """Copy rows, of which ``used`` columns matter, to other places."""
        for layer in self.layers:
            for values in layer.tokens.values():
                values[to, :, :used] = values[rows, :, :used]
            for state in layer.states.values():
                state[to] = state[rows]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the call's keys and values [N, heads, T, D] of a layer; returns those that its queries see."""
        layer = self._layer(layer_idx)
        self.written += 1
        return self._write(layer, "keys", key_states), self._write(layer, "values", value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the call's keys [N, T, D] of a layer's index; returns those that its queries see."""
        return self._write(self._layer(layer_idx), "index", indexer_key_states[:, None])[:, 0]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Write a layer's last inputs, [N, …, kernel size]; returns the inputs [N, …, T] with those before them."""
        layer = self._layer(layer_idx)
        if self._of is not None:
            state = self._state(layer, "conv", state_idx)
            inputs = torch.cat([state, conv_states], -1)
            state.copy_(inputs[..., -state.shape[-1] :])
            return inputs
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        inputs = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self._read_state(layer, "conv", state_idx, inputs[..., -size:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Write a layer's state [N, …] after the call's tokens; returns the state."""
        layer = self._layer(layer_idx)
        if self._of is None:
            self._read_state(layer, "recurrent", state_idx, recurrent_states)
            return recurrent_states
        return self._state(layer, "recurrent", state_idx).copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the present call goes on where states were left."""
        return self._of is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the present call's come after, at most."""
        return max(0, self._used - 1)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Tokens that the present call's come after: of each row, [N], if they are not the same."""
        return self.get_seq_length(layer_idx) if self._offsets is None else self._offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the present call's queries see, from the first."""
        return (self._used or query_length), 0

    @property
    def is_compileable(self) -> bool:
        """False: rows and room grow."""
        return False

    def _layer(self, number: int) -> "RowLayer":
        while len(self.layers) <= number:
            self.layers.append(RowLayer(self))
        return self.layers[number]

    def _write(self, layer: "RowLayer", name: Stored, new: torch.Tensor) -> torch.Tensor:
        """Write [N, heads, T, D] of the call's tokens; returns what its queries see."""
        if name not in layer.tokens:
            layer.tokens[name] = new.new_zeros((self.rows, new.shape[1], self.capacity, new.shape[3]))
        values, tokens = layer.tokens[name], new.transpose(1, 2).flatten(0, 1)
        tokens = tokens[self._source] if self._of is None else tokens
        values.view(-1, values.shape[3]).index_copy_(0, self._of_heads(new.shape[1]), tokens.flatten(0, 1))
        if self._of is None:
            return new
        present = values[: self._of] if isinstance(self._of, int) else values[self._of]
        return present[:, :, : self._used]

    def _of_heads(self, heads: int) -> torch.Tensor:
        """Where the heads of the call's tokens lie, of a layer's [rows · heads · capacity]; the same for all layers."""
        if heads not in self._places:
            head = self._rows[:, None] * heads + torch.arange(heads, device=self._rows.device)
            self._places[heads] = (head * self.capacity + self._columns[:, None]).flatten()
        return self._places[heads]

    def _read_state(self, layer: "RowLayer", kind: Kind, number: int, new: torch.Tensor) -> None:
        """Give the rows of the sequences that were read their states."""
        if self._sequences is None:
            self.mixed = True
            return
        if (kind, number) not in layer.states:
            layer.states[kind, number] = new.new_zeros((self.rows, *new.shape[1:]))
        sequences, rows = self._sequences.T
        layer.states[kind, number][rows] = new[sequences]

    def _state(self, layer: "RowLayer", kind: Kind, number: int) -> torch.Tensor:
        """A state of the rows that get a token, to be written in place."""
        stored = layer.states[kind, number]
        if isinstance(self._of, int):
            return stored[: self._of]
        key = layer, kind, number
        if key not in self._borrowed:
            self._borrowed[key] = stored[self._of]
        return self._borrowed[key]


class RowLayer:
    """A layer's part of the cache, with the names by which transformers' models read states."""

    is_sliding = is_compileable = record_past = False

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self.tokens: dict[Stored, torch.Tensor] = {}
        self.states: dict[tuple[Kind, int], torch.Tensor] = {}

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Last inputs of the layer's convolutions, of the rows that get a token."""
        return self._present("conv")

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """The layer's states, of the rows that get a token."""
        return self._present("recurrent")

    def _present(self, kind: Kind) -> dict[int, Any]:
        return {number: self._cache._state(self, one, number) for one, number in self.states if one == kind}
