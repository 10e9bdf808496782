"""``PairBatch``: comparisons as tensors, and a worker's comparisons cut into micro-batches without splitting any."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_bridge.data.micro_batches import packed_rows, padded_rows
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory


class PairBatch(NamedTuple):
    """N comparisons of K completions each, which stay together: K is 2 for pairs and 1 for single completions.

    What is not ``present`` counts nowhere: shorter ones among ranked lists.
    """

    completions: TokenBatch
    """N·K rows, the completions of a comparison one after another: chosen, rejected, …"""
    present: torch.Tensor
    """[N, K] bool."""
    desirable: torch.Tensor
    """[N] bool: the label of single completions, True for others."""
    numbers: dict[str, torch.Tensor]
    """[N] float32 each: columns of the data that a loss reads, such as margin."""
    ref_logprobs: torch.Tensor | None = None
    """[N, K]: log π_ref of each completion, the sum over its tokens that count."""

    @property
    def sides(self) -> int:
        """K."""
        return self.present.shape[1]

    @property
    def chosen(self) -> TokenBatch:
        """The first completion of each comparison."""
        return self.completions.rows(slice(0, None, self.sides))

    @property
    def rejected(self) -> TokenBatch:
        """The second completion of each comparison."""
        return self.completions.rows(slice(1, None, self.sides))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PairBatch":
        """The batch with ``function`` applied to every tensor."""
        return PairBatch(
            self.completions.map(function),
            function(self.present),
            function(self.desirable),
            {name: function(value) for name, value in self.numbers.items()},
            None if self.ref_logprobs is None else function(self.ref_logprobs),
        )

    def row_tokens(self) -> list[int]:
        """Tokens of each comparison: what an engine balances its workers by."""
        return self.lengths().sum(1).tolist()

    def lengths(self) -> torch.Tensor:
        """[N, K] int64: tokens of each completion, prompt included."""
        return self.completions.lengths.view(self.present.shape)

    def counted(self) -> torch.Tensor:
        """[N, K] int64: tokens of each completion that count in a loss."""
        return self.completions.mask.sum(1).view(self.present.shape)

    def rows(self, index: torch.Tensor | slice) -> "PairBatch":
        """The chosen comparisons, whole."""
        places = torch.arange(self.present.numel(), device=self.present.device).view(self.present.shape)[index]
        return PairBatch(
            self.completions.rows(places.flatten()),
            self.present[index],
            self.desirable[index],
            {name: value[index] for name, value in self.numbers.items()},
            None if self.ref_logprobs is None else self.ref_logprobs[index],
        )

    def side(self, place: int) -> "PairBatch":
        """One completion of each comparison, as a batch of single completions."""
        return PairBatch(
            self.completions.rows(slice(place, None, self.sides)).trim(),
            self.present[:, place : place + 1],
            self.desirable,
            self.numbers,
            None if self.ref_logprobs is None else self.ref_logprobs[:, place : place + 1],
        )

    def to(self, device: torch.device | str) -> "PairBatch":
        """The batch on a device."""
        return self.map(lambda value: value.to(device))


class PairPart(NamedTuple):
    """``batch`` holds the comparisons ``places`` of a larger one. Without places nothing in it counts."""

    places: torch.Tensor
    batch: PairBatch


def pair_parts(
    batch: PairBatch, max_tokens: int, *, packing: bool = False, share_prefixes: bool = False
) -> list[PairPart]:
    """The batch in parts of at most ``max_tokens`` tokens, or one comparison.

    Padding counts, unless rows are packed. Completions that share a prompt worth it always are; it counts once.
    """
    alone, parts = np.arange(len(batch.present)), []
    lengths = batch.lengths()
    if share_prefixes and len(alone):
        shared = batch.completions.prefixes_worth_sharing().view(batch.present.shape)
        saved = (shared.sum(1) - shared.max(1).values).cpu().numpy()
        sharing, alone = np.flatnonzero(saved), np.flatnonzero(saved == 0)
        tokens = lengths.sum(1).cpu().numpy() - saved
        parts = [sharing[part] for part in packed_rows(tokens[sharing].tolist(), max_tokens)]
    rest = lengths[torch.from_numpy(alone).to(lengths.device)]
    if packing:
        cut = packed_rows(rest.sum(1).tolist(), max_tokens)
    else:
        cut = padded_rows(rest.max(1).values.tolist() if len(alone) else [], max_tokens // batch.sides)
    places = [torch.from_numpy(part).to(batch.present.device) for part in [*parts, *(alone[part] for part in cut)]]
    return [PairPart(index, _trimmed(batch.rows(index))) for index in places]


def stand_in_pair(batch: PairBatch) -> PairPart:
    """What a worker computes while others still have comparisons, so that all join the same collectives."""
    sides = batch.sides

    def nothing(value: torch.Tensor) -> torch.Tensor:
        return value.new_zeros((1, *value.shape[1:]))

    completions = batch.completions.map(lambda value: value.new_zeros((sides, 2) if value.dim() > 1 else sides))
    empty = batch._replace(completions=batch.completions.map(nothing)).map(nothing)
    completions = completions._replace(lengths=completions.lengths + 2)
    return PairPart(batch.completions.lengths.new_zeros(0), empty._replace(completions=completions))


def restore_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """[N, K] of the shape of ``like`` from (places, [n, K]) pairs."""
    whole = torch.zeros(like.shape, device=like.device)
    for places, values in parts:
        if len(places):
            whole[places] = values.to(whole)
    return whole


def collate_comparisons(
    comparisons: Sequence[Sequence[Trajectory]],
    pad_token_id: int,
    *,
    desirable: Sequence[bool] | None = None,
    numbers: Mapping[str, Sequence[float]] | None = None,
) -> PairBatch:
    """Encoded completions of each comparison → a batch; lists of unequal length are filled with what is not present.

    Raises:
        ValueError: no comparisons, or a completion without a token that counts.
    """
    if not comparisons or not all(comparisons):
        raise ValueError("cannot make a batch of no comparisons, or of one without completions")
    sides = max(len(row) for row in comparisons)
    flat: list[Trajectory] = []
    for group, row in enumerate(comparisons):
        for trajectory in row:
            if not any(trajectory.loss_mask):
                where = trajectory.row.get("_where", f"comparison {group}")
                raise ValueError(f"{where}: a completion has no token that counts")
        flat += [*row, *[_ABSENT] * (sides - len(row))]
    present = torch.tensor([[place < len(row) for place in range(sides)] for row in comparisons])
    # What is not present is in no group: it shares no prompt.
    groups = torch.arange(len(comparisons)).repeat_interleave(sides)
    groups = torch.where(present.flatten(), groups, -1 - torch.arange(len(groups)))
    completions = collate(flat, pad_token_id)._replace(groups=groups, rollout_logprobs=None)
    labels = [True] * len(comparisons) if desirable is None else list(desirable)
    columns = {name: torch.tensor(values, dtype=torch.float32) for name, values in (numbers or {}).items()}
    return PairBatch(completions, present, torch.tensor(labels), columns)


_ABSENT: Any = Trajectory(
    tokens=(0, 0), loss_mask=(False, False), logprobs=(0.0, 0.0), weights_versions=(-1, -1), finish_reason="stop"
)


def _trimmed(batch: PairBatch) -> PairBatch:
    return batch._replace(completions=batch.completions.trim())
