"""Tensors packed into buckets of bytes, each with the checksums that its writers claim."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_bridge.weights.manifest import TensorSpec
from rl_bridge.weights.parts import Part

_ALIGNMENT = 64


class Entry(NamedTuple):
    """A tensor of the stream: ``origin`` is the number of the source's tensor that it was made from."""

    name: str
    spec: TensorSpec
    origin: int
    offset: int


class Bucket(NamedTuple):
    """Tensors that travel together; ``nbytes`` without the claims."""

    number: int
    entries: tuple[Entry, ...]
    nbytes: int


class Claim(NamedTuple):
    """A writer's word about the bits of one part of a tensor."""

    part: Part
    checksum: int


def plan_buckets(tensors: Sequence[tuple[str, TensorSpec, int]], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut (name, spec, origin) into buckets of at most ``bucket_bytes``; a larger tensor has a bucket of its own."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    end = 0
    for name, spec, origin in tensors:
        if entries and end + spec.nbytes > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(entries), end))
            entries, end = [], 0
        entries.append(Entry(name, spec, origin, end))
        end = aligned(end + spec.nbytes)
    if entries:
        buckets.append(Bucket(len(buckets), tuple(entries), end))
    return tuple(buckets)


def aligned(nbytes: int) -> int:
    """The next multiple of 64 bytes, where a tensor of any dtype may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Frame:
    """One bucket in a buffer of bytes: the claims of its writers, then its tensors.

    The claims are int64 [writers, 1 + entries, 2 + 2·dimensions]. A writer's first row is (failed, bucket's number);
    the row of an entry is (claimed, checksum, starts…, lengths…).
    """

    def __init__(self, buffer: torch.Tensor, bucket: Bucket, writers: int) -> None:
        """``buffer``: uint8, at least ``Frame.nbytes`` of it."""
        self.bucket = bucket
        rows, columns = _claims_shape(bucket)
        size = writers * rows * columns * 8
        self._claims = buffer[:size].view(torch.int64).view(writers, rows, columns)
        self._payload = buffer[aligned(size) :]
        self.buffer = buffer[: aligned(size) + bucket.nbytes]

    @staticmethod
    def nbytes(bucket: Bucket, writers: int) -> int:
        """Bytes of a bucket with its claims."""
        rows, columns = _claims_shape(bucket)
        return aligned(writers * rows * columns * 8) + bucket.nbytes

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The memory of an entry, in its shape and dtype."""
        octets = self._payload[entry.offset : entry.offset + entry.spec.nbytes]
        return octets.view(entry.spec.dtype).view(entry.spec.shape)

    def claim(self, writer: int, claims: dict[int, Claim], *, failed: bool) -> None:
        """Write what a writer claims: {place of the entry in the bucket: claim}."""
        table = torch.zeros(self._claims.shape[1:], dtype=torch.int64)
        table[0, 0], table[0, 1] = int(failed), self.bucket.number
        for place, (part, bits) in claims.items():
            starts, lengths = [start for start, _ in part], [length for _, length in part]
            row = [1, bits, *starts, *lengths]
            table[1 + place, : len(row)] = torch.tensor(row)
        self._claims[writer].copy_(table)

    def claims(self) -> list[list[Claim]]:
        """The claims of each entry.

        Raises:
            ValueError: a writer failed, or the bytes are another bucket's.
        """
        table = self._claims.cpu()
        for writer, (failed, number) in enumerate(table[:, 0, :2].tolist()):
            if failed:
                raise SourceFailed(f"the source's member {writer} failed at bucket {self.bucket.number}")
            if number != self.bucket.number:
                raise ValueError(f"bucket {self.bucket.number} was damaged on the way: it says that it is {number}")
        made: list[list[Claim]] = []
        for place, entry in enumerate(self.bucket.entries):
            dims = len(entry.spec.shape)
            rows = [row for row in table[:, 1 + place].tolist() if row[0]]
            made.append(
                [Claim(tuple(zip(r[2 : 2 + dims], r[2 + dims : 2 + 2 * dims], strict=True)), r[1]) for r in rows]
            )
        return made


class SourceFailed(RuntimeError):
    """The sending end gave up; its own error says why."""


def _claims_shape(bucket: Bucket) -> tuple[int, int]:
    dims = max(len(entry.spec.shape) for entry in bucket.entries)
    return 1 + len(bucket.entries), 2 + 2 * dims
