"""``TokenBatch``: the tensors between rollouts and trainers, their common prefixes, and their micro-batches."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_bridge.data.trajectory import Trajectory
from rl_fn.packing import pack

# First tokens that the rows of a group have in common, and the rows that then go together.

# Sharing pays from this part of a group's longest row on: below, the calls of attention cost what the tokens saved.
WORTH = 1 / 8


def shared_prefixes(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, *alike: torch.Tensor
) -> torch.Tensor:
    """How many first tokens the rows of a group need to compute only once, [N].

    That is one less than they have in common: the last common token predicts another token in every row. Rows without
    others in their group have 0.

    tokens: [N, L]. lengths, groups: [N]. alike: [N, L, …], what must be equal besides for tokens to be in common.

    >>> import torch
    >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 8]])
    >>> shared_prefixes(tokens, torch.tensor([4, 3, 4]), torch.tensor([1, 1, 2]))
    tensor([1, 1, 0])
    """
    if not len(groups):
        return torch.zeros_like(lengths)
    members = _Groups(groups)
    first = members.least(torch.arange(len(groups), device=groups.device))
    same = torch.arange(tokens.shape[1], device=tokens.device) < torch.minimum(lengths, lengths[first])[:, None]
    for value in (tokens, *alike):
        same &= (value == value[first]).flatten(2).all(-1) if value.dim() > 2 else value == value[first]
    common = members.least(same.int().cumprod(1).sum(1))
    return torch.where(members.sizes > 1, (common - 1).clamp(min=0), 0).to(lengths.dtype)


def prefixes_worth_sharing(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, *alike: torch.Tensor
) -> torch.Tensor:
    """``shared_prefixes`` where these are at least an eighth of their group's longest row, else 0.

    What is worth sharing in a group is so among some of its rows too: they have at least as much in common.
    """
    shared = shared_prefixes(tokens, lengths, groups, *alike)
    if not bool(shared.any()):
        return shared
    longest = -_Groups(groups).least(-lengths)
    return torch.where(shared >= WORTH * longest, shared, 0)


class Unit(NamedTuple):
    """Rows that go together, ascending, and the tokens that they cost: a shared prefix counts once."""

    rows: np.ndarray
    tokens: int


def units_of(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], max_tokens: int | None = None
) -> list[Unit]:
    """The rows of a group that shares a prefix as one unit, every other row as one of its own.

    A group of more than ``max_tokens`` is several units; a row that such a limit leaves alone shares nothing.

    >>> [(unit.rows.tolist(), unit.tokens) for unit in units_of([6, 3, 5, 6], [0, 1, 0, 0], [4, 0, 4, 4], 8)]
    [([0, 2], 7), ([1], 3), ([3], 6)]
    """
    units: list[list[int]] = []
    tokens: list[int] = []
    open_unit: dict[int, int] = {}
    for row, (length, group, prefix) in enumerate(zip(lengths, groups, shared, strict=True)):
        number = open_unit.get(group) if prefix else None
        if number is None or (max_tokens is not None and tokens[number] + length - prefix > max_tokens):
            number = len(units)
            units.append([row])
            tokens.append(length)
            if prefix:
                open_unit[group] = number
        else:
            units[number].append(row)
            tokens[number] += length - prefix
    return [Unit(np.asarray(rows, np.int64), count) for rows, count in zip(units, tokens, strict=True)]


class _Groups:
    """Rows by group."""

    def __init__(self, groups: torch.Tensor) -> None:
        _, self._index, counts = groups.unique(return_inverse=True, return_counts=True)
        self._count = len(counts)
        self.sizes = counts[self._index]

    def least(self, values: torch.Tensor) -> torch.Tensor:
        """The least value of each row's group."""
        start = values.new_full((self._count,), torch.iinfo(values.dtype).max)
        return start.scatter_reduce(0, self._index, values, "amin")[self._index]


# ``TokenBatch``: the tensors that travel between rollouts and trainers, under the names of ``rl_fn.Batch``.


class TokenBatch(NamedTuple):
    """N trajectories of up to L tokens, prompt included, padded on the right. ``x[n, t]`` belongs to ``tokens[n, t]``.

    Fields that a stage has not filled yet are None. What lies where ``mask`` is False counts nowhere.
    """

    tokens: torch.Tensor
    """[N, L] int64."""
    mask: torch.Tensor
    """[N, L] bool: tokens that count in a loss. Holes are allowed; the first column is False."""
    lengths: torch.Tensor
    """[N] int64: tokens of each row; behind them is padding."""
    groups: torch.Tensor
    """[N] int64: equal for rows of one prompt."""
    rollout_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    allowed_tokens: torch.Tensor | None = None
    """[N, L, S] int64: ids that the truncated sampler allowed, rising, −1 behind them and where nothing was drawn."""
    correct: torch.Tensor | None = None
    """[N, L] bool: tokens of completions that earned the reward (VAPO)."""
    noise: torch.Tensor | None = None
    """[N, L]: uniform numbers in [0, 1) (Clip-Cov's draw)."""
    segment_ids: torch.Tensor | None = None
    """[N, L] int64, not falling: the turn that a token belongs to, where a loss is averaged over turns (GiGPO)."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenBatch":
        """The batch with ``function`` applied to every field that is present."""
        fields: Any = (None if value is None else function(value) for value in self)
        return TokenBatch(*fields)

    def row_tokens(self) -> list[int]:
        """Tokens of each row: what an engine balances its workers by."""
        return self.lengths.tolist()

    def row_units(self) -> list[Unit]:
        """Rows that share a prefix worth it, together, and every other row alone: what an engine keeps on a worker."""
        return units_of(self.row_tokens(), self.groups.tolist(), self.prefixes_worth_sharing().tolist())

    def prefixes_worth_sharing(self) -> torch.Tensor:
        """How many first tokens of each row are computed once for its group, [N]; 0 where that is not worth it.

        A token is shared where all that scores it is the same: it counts in all of the rows or in none.
        """
        alike = (self.mask,) if self.allowed_tokens is None else (self.mask, self.allowed_tokens)
        return prefixes_worth_sharing(self.tokens, self.lengths, self.groups, *alike)

    def rows(self, index: torch.Tensor | slice) -> "TokenBatch":
        """The chosen rows."""
        return self.map(lambda value: value[index])

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The batch on a device."""
        return self.map(lambda value: value.to(device))

    def trim(self) -> "TokenBatch":
        """Drop the columns that are padding in every row: fewer tokens, the same numbers. One column stays.

        Of the allowed tokens those places are dropped, too, that no set of these rows fills.
        """
        width = max(1, int(self.lengths.max())) if len(self.lengths) else 1
        batch = self.map(lambda value: value if value.dim() < 2 else value[:, :width])
        if batch.allowed_tokens is None:
            return batch
        largest = max(1, int((batch.allowed_tokens >= 0).flatten(0, 1).any(0).sum()))
        return batch._replace(allowed_tokens=batch.allowed_tokens[..., :largest])


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> TokenBatch:
    """Trajectories → a padded batch with the log-probabilities kept from sampling time.

    Raises:
        ValueError: for no trajectories, where only some recorded the tokens that were allowed, or where a token that
            counts is not what the engine drew.
    """
    if not trajectories:
        raise ValueError("cannot make a batch of no trajectories")
    for trajectory in trajectories:
        trajectory.require_sampled()
    lengths = torch.tensor([len(t.tokens) for t in trajectories])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(values: Iterable[Sequence[Any]], empty: torch.Tensor) -> torch.Tensor:
        # One tensor of all tokens: one of each row would take longer than a small model's forward pass.
        empty[inside] = torch.tensor(list(chain.from_iterable(values)), dtype=empty.dtype)
        return empty

    return TokenBatch(
        padded((t.tokens for t in trajectories), torch.full(inside.shape, pad_token_id)),
        padded((t.loss_mask for t in trajectories), torch.zeros_like(inside)),
        lengths,
        torch.tensor([t.group for t in trajectories]),
        rollout_logprobs=padded((t.logprobs for t in trajectories), torch.zeros(inside.shape)),
        allowed_tokens=_allowed_tokens(trajectories, inside),
    )


def _allowed_tokens(trajectories: Sequence[Trajectory], inside: torch.Tensor) -> torch.Tensor | None:
    """[N, L, S] of the sets of tokens at the places that are ``inside`` [N, L]; None if nobody recorded any."""
    # Where the policy drew nothing there is no set to record.
    sampled = [n for n, t in enumerate(trajectories) if any(t.loss_mask)]
    without = [n for n in sampled if trajectories[n].allowed_tokens is None]
    if len(without) == len(sampled):
        return None
    if without:
        raise ValueError(
            f"allowed_tokens are recorded in all trajectories of a batch or in none: {len(without)} of "
            f"{len(trajectories)} lack them, trajectory {without[0]} first"
        )
    sets: list[Sequence[int]] = []
    for t in trajectories:
        sets.extend([()] * len(t.tokens) if t.allowed_tokens is None else t.allowed_tokens)
    counts = torch.tensor([len(ids) for ids in sets])
    ids = torch.tensor(list(chain.from_iterable(sets)), dtype=torch.int64)
    largest = max(1, int(counts.max()))
    allowed = torch.full((*inside.shape, largest), -1)
    row, column = (x.repeat_interleave(counts) for x in inside.nonzero(as_tuple=True))
    allowed[row, column, torch.arange(len(ids)) - (counts.cumsum(0) - counts).repeat_interleave(counts)] = ids
    return allowed


# A worker's rows cut into micro-batches that fit its memory, and their results put back in place.


class MicroBatch(NamedTuple):
    """``batch`` holds the rows ``places`` of a larger one, without the columns that are padding in all of them.

    Without places it is a stand-in: one row in which nothing counts.
    """

    places: torch.Tensor
    batch: TokenBatch

    def to(self, device: torch.device) -> "MicroBatch":
        """The batch on a device; the places stay where the larger batch is."""
        return self._replace(batch=self.batch.to(device))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The entries of [N, L, ...] that belong to this part; zeros for a stand-in."""
        rows, columns = self.batch.tokens.shape
        return whole[self.places, :columns] if len(self.places) else whole.new_zeros((rows, columns, *whole.shape[2:]))


def padded_rows(lengths: Sequence[int], max_tokens: int) -> list[np.ndarray]:
    """Rows that go together when each is padded to the longest beside it: rows of similar length.

    A micro-batch has at most ``max_tokens`` tokens, padding included, or one row. Returns ascending row numbers; every
    row is in exactly one.

    >>> [part.tolist() for part in padded_rows([3, 9, 4, 8], 18)]
    [[0, 2], [1, 3]]
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    parts: list[list[int]] = []
    for row in order.tolist():
        # Rows come by length: this one is the widest so far.
        if parts and (len(parts[-1]) + 1) * max(1, lengths[row]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [np.sort(np.asarray(part, np.int64)) for part in parts]


def packed_rows(lengths: Sequence[int], max_tokens: int) -> list[np.ndarray]:
    """Rows that go together when they lie one behind another, without padding: as few micro-batches as will do.

    A micro-batch has at most ``max_tokens`` tokens, or one row. Returns ascending row numbers; every row is in exactly
    one.

    >>> [part.tolist() for part in packed_rows([3, 9, 20, 4, 8], 12)]
    [[2], [0, 1], [3, 4]]
    """
    array = np.asarray(lengths, np.int64)
    alone, rest = np.flatnonzero(array > max_tokens), np.flatnonzero(array <= max_tokens)
    return [np.array([row]) for row in alone] + [rest[part] for part in pack(array[rest], max_tokens)]


def sharing_rows(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], max_tokens: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows that share prefixes, packed into as few micro-batches as will do, and the rows that share with no other.

    The rows of a group go together where ``max_tokens`` has room for them, and their prefix counts once.

    >>> [part.tolist() for part in sharing_rows([6, 3, 5, 6, 6], [0, 1, 0, 2, 2], [4, 0, 4, 5, 5], 14)[0]]
    [[0, 2, 3, 4]]
    """
    units = units_of(lengths, groups, shared, max_tokens)
    together = [unit for unit in units if len(unit.rows) > 1]
    alone = [unit.rows for unit in units if len(unit.rows) == 1]
    parts = [
        np.sort(np.concatenate([together[i].rows for i in part]))
        for part in pack([unit.tokens for unit in together], max_tokens)
    ]
    return parts, np.concatenate(alone) if alone else np.zeros(0, np.int64)


def micro_batches(
    batch: TokenBatch, max_tokens: int, *, packing: bool = False, share_prefixes: bool = False
) -> list[MicroBatch]:
    """The batch in parts, each row in exactly one.

    ``max_tokens`` counts padding, unless rows are packed. Rows that share a prefix worth it always are.
    """
    lengths, parts, alone = batch.row_tokens(), [], np.arange(len(batch.lengths))
    if share_prefixes:
        shared = batch.prefixes_worth_sharing().tolist()
        parts, alone = sharing_rows(lengths, batch.groups.tolist(), shared, max_tokens)
    rest = (packed_rows if packing else padded_rows)([lengths[row] for row in alone.tolist()], max_tokens)
    parts += [alone[part] for part in rest]
    places = [torch.from_numpy(part).to(batch.tokens.device) for part in parts]
    return [MicroBatch(rows, batch.rows(rows).trim()) for rows in places]


def stand_in(batch: TokenBatch) -> MicroBatch:
    """A row that counts nothing, for a worker that is done before others: all join the collectives."""

    def nothing(value: torch.Tensor) -> torch.Tensor:
        # Behind [N, L] there are sets of tokens: −1 is no token.
        return value.new_zeros((1, 2)[: value.dim()]) if value.dim() < 3 else value.new_full((1, 2, 1), -1)

    empty = batch.map(nothing)
    return MicroBatch(batch.lengths.new_zeros(0), empty._replace(lengths=empty.lengths + 2))


def restore(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """[N, L] of the shape of ``like`` from (places, [n, l ≤ L]) pairs; zero in the columns that were cut off."""
    whole = torch.zeros(like.shape, device=like.device)
    for places, values in parts:
        if len(places):
            whole[places, : values.shape[1]] = values.to(whole)
    return whole
