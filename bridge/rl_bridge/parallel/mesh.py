"""How the workers of an engine are arranged: four axes, each of size 1 unless asked for."""

from dataclasses import dataclass
from typing import NamedTuple

from rl_bridge.common.terminal import given

AXES = ("replicate", "shard", "sequence", "tensor")
"""The axes of a mesh, slowest first: neighbours in ``tensor`` have neighbouring ranks."""


class Place(NamedTuple):
    """Where a rank stands on each axis."""

    replicate: int
    shard: int
    sequence: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes.

    ``replicate``: copies of the model, each with rows of its own. ``shard``: parameters and optimiser cut by FSDP2,
    each rank with rows of its own. ``sequence``: tokens of the same rows cut by ring attention. ``tensor``: matrices
    cut by tensor parallelism, with the same rows on every rank.

    >>> Mesh(shard=2, tensor=2).size
    4
    >>> Mesh(shard=2, tensor=2).place(3)
    Place(replicate=0, shard=1, sequence=0, tensor=1)
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        """Refuse an axis without a rank."""
        if min(self.shape) < 1:
            raise ValueError(f"every axis of a mesh has at least one rank, got {given(self, *AXES)}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of ``AXES``."""
        return self.replicate, self.shard, self.sequence, self.tensor

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_parts(self) -> int:
        """Shares that the rows of a batch are split into."""
        return self.replicate * self.shard

    def place(self, rank: int) -> Place:
        """Where ``rank`` stands."""
        rank, tensor = divmod(rank, self.tensor)
        rank, sequence = divmod(rank, self.sequence)
        replicate, shard = divmod(rank, self.shard)
        return Place(replicate, shard, sequence, tensor)

    def data_rank(self, rank: int) -> int:
        """Which share of the rows ``rank`` works on."""
        return rank // (self.sequence * self.tensor)

    def speakers(self) -> list[int]:
        """One rank of each share of rows: those whose results are joined."""
        return list(range(0, self.size, self.sequence * self.tensor))

    def token_speakers(self) -> list[int]:
        """One rank of each share of tokens: those whose results are joined where the columns were cut, too."""
        return list(range(0, self.size, self.tensor))
