"""Tensors of a sync: their names in a module, the part that each worker holds, the manifest that both ends compare."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from rl_bridge.common.splitmix64 import GOLDEN, MASK, mix, signed

if TYPE_CHECKING:
    from peft import PeftModel


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Small enough for the temporaries to stay in a CPU's cache; a GPU wants few launches.
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 22


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bits, computed where the tensor lies: the proof that a weight arrived as sent.

    Σ mix(word + place·golden) modulo 2⁶⁴: one changed word always changes the sum, because mix is a bijection; words
    that changed places do but for a chance of 2⁻⁶⁴, because mix is not linear. The same on every device.

    >>> checksum(torch.zeros(2)) == checksum(torch.tensor([0.0, -0.0]))
    False
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()  # a part of another tensor: its words would begin between two of memory
    words = next(octets.view(dtype) for size, dtype in _WORDS if octets.numel() % size == 0)
    return _on_the_cpu(words.numpy()) if words.device.type == "cpu" else _on_a_device(words)


def _on_a_device(words: torch.Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _DEVICE_CHUNK):
        block = words[start : start + _DEVICE_CHUNK].to(torch.int64)
        places = torch.arange(start, start + block.numel(), device=words.device)
        total += mix(places.mul_(signed(GOLDEN)).add_(block)).sum()
    return int(total)


@cache
def _places(count: int) -> np.ndarray:
    """(place + 1)·golden: mix begins by adding golden once more."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _on_the_cpu(words: np.ndarray) -> int:
    """The same sum. NumPy has unsigned shifts and works in place, which makes this three times as fast as torch."""
    size = min(_CHUNK, words.size)
    places = _places(_CHUNK)
    bits, shifted = np.empty(size, np.uint64), np.empty(size, np.uint64)
    total = 0
    for start in range(0, words.size, _CHUNK):
        block = words[start : start + _CHUNK].astype(np.int64, copy=False).view(np.uint64)
        b, s = bits[: block.size], shifted[: block.size]
        np.add(block, places[: block.size], out=b)
        b += np.uint64(start * GOLDEN & MASK)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(b, np.uint64(shift), out=s)
            b ^= s
            b *= np.uint64(factor)
        np.right_shift(b, np.uint64(31), out=s)
        b ^= s
        total += int(np.add.reduce(b))
    return signed(total)


def replace_parameters(model: torch.nn.Module, device: torch.device) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Give every parameter an empty tensor on ``device``; returns old → new.

    With ``meta`` all of them lose their values. With another device only the parameters on ``meta`` are replaced, which
    have none. Unlike with ``Module.to("meta")`` and ``Module.to_empty``, tied parameters stay tied, and the buffers,
    which no transfer of weights would bring back, stay as they are.
    """
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and (old.is_meta or device.type == "meta"):
                if old not in replaced:
                    empty = torch.empty_like(old, device=device)
                    replaced[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
                module._parameters[name] = replaced[old]
    return replaced


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def is_peft(module: Any) -> "TypeGuard[PeftModel]":
    """Whether this is a peft model; without peft loaded there is none."""
    return "peft" in sys.modules and isinstance(module, sys.modules["peft"].PeftModel)


def without_peft(model: torch.nn.Module) -> torch.nn.Module:
    """The model that a peft model wraps, adapters inside; any other model is itself."""
    return model.get_base_model() if is_peft(model) else model


def class_of(module: torch.nn.Module) -> type[Any]:
    """The module's class as its author named it; FSDP2 gives the module another one."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(module).__mro__ if FSDPModule not in (kind, *kind.__bases__))


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter or persistent buffer), tied ones once; FSDP2 parameters as the shards they are stored as."""
    reshard(module)
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter
    yielded: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and id(buffer) not in yielded:
                yielded.add(id(buffer))
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def reshard(module: torch.nn.Module) -> None:
    """Give FSDP2 parameters their shards back.

    After a forward pass the root keeps gathered copies in the compute dtype: reading them would send rounded values,
    and what is written to them is lost.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def plain_name(name: str) -> str:
    """The name without what activation checkpointing and torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


Part = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: (start, length) for each dimension."""


def whole(shape: Sequence[int]) -> Part:
    """The part that is everything."""
    return tuple((0, length) for length in shape)


def volume(part: Part) -> int:
    """How many elements a part has."""
    elements = 1
    for _, length in part:
        elements *= length
    return elements


def overlap(one: Part, other: Part) -> Part:
    """The part that both parts hold, of volume 0 if they share nothing.

    >>> overlap(((0, 4), (0, 2)), ((3, 4), (0, 2)))
    ((3, 1), (0, 2))
    """
    shared = []
    for (a, m), (b, n) in zip(one, other, strict=True):
        start = max(a, b)
        shared.append((start, max(0, min(a + m, b + n) - start)))
    return tuple(shared)


def inside(tensor: torch.Tensor, held: Part, part: Part) -> torch.Tensor:
    """The view of ``part`` (a part of the whole) in a tensor that holds the part ``held`` of the whole."""
    for dim, ((start, length), (origin, _)) in enumerate(zip(part, held, strict=True)):
        tensor = tensor.narrow(dim, start - origin, length)
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this process holds of a tensor; shares its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Of a DTensor, all processes of its mesh take part."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    # Shards that were offloaded to host memory are gathered where the mesh communicates.
    moved = detached.to(detached.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    return moved.full_tensor()


def part_of(tensor: torch.Tensor) -> Part:
    """The part of the whole tensor that this process holds.

    Raises:
        NotImplementedError: a DTensor whose local values are sums to be reduced, are no single rectangle, or are not
            what its placements say.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process is not in the tensor's mesh"
    part = placed_part(tensor.shape, mesh.shape, coordinate, tensor.placements)
    local_shape = tuple(tensor.to_local().shape)
    if tuple(length for _, length in part) != local_shape:
        # FSDP2 over tensor parallelism, where the rows do not split evenly: the placements are not what FSDP2 did.
        raise NotImplementedError(
            f"a weight of shape {tuple(tensor.shape)} placed {tuple(tensor.placements)} over {tuple(mesh.shape)} ranks "
            f"should have {part} here, and has a shape of {local_shape}: it does not split evenly"
        )
    return part


def placed_part(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Part:
    """The part of a tensor of ``shape`` at a coordinate of a mesh: each placement cuts what those before it left.

    >>> placed_part([5, 2], [2], [1], [Shard(0)])
    ((3, 2), (0, 2))
    """
    axes = [[(0, length)] for length in shape]
    for ranks, number, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            dim = placement.dim
            axes[dim] = [
                interval
                for chunk in _chunks(axes[dim], int(placement.split_factor))
                for interval in _chunks(chunk, ranks)[number]
            ]
        elif isinstance(placement, Shard):
            axes[placement.dim] = _chunks(axes[placement.dim], ranks)[number]
        elif not placement.is_replicate():
            raise NotImplementedError(f"a weight placed {placement} over {ranks} ranks: only shards and copies travel")
    return tuple(_one(intervals, placements) for intervals in axes)


def _chunks(intervals: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Places of a dimension, cut into ``count`` chunks as ``torch.chunk`` cuts: the last ones smaller or empty."""
    total = sum(length for _, length in intervals)
    size = -(-total // count)
    cuts = [min(i * size, total) for i in range(count + 1)]
    return [_between(intervals, low, high) for low, high in pairwise(cuts)]


def _between(intervals: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    clipped, passed = [], 0
    for start, length in intervals:
        first, last = max(low, passed), min(high, passed + length)
        if first < last:
            clipped.append((start + first - passed, last - first))
        passed += length
    return clipped


def _one(intervals: list[tuple[int, int]], placements: Sequence[Placement]) -> tuple[int, int]:
    """The intervals as one: neighbours are joined; none at all is an empty one."""
    if not intervals:
        return (0, 0)
    for (a, m), (b, _) in pairwise(intervals):
        if a + m != b:
            raise NotImplementedError(f"a weight placed {tuple(placements)}: this process holds no single rectangle")
    return (intervals[0][0], sum(length for _, length in intervals))


_SHOWN = 4


class TensorSpec(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape_numel * self.dtype.itemsize

    @property
    def shape_numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Manifest:
    """Names in the order of the stream; with ``adapter`` they are a LoRA adapter's, and this is its configuration."""

    tensors: dict[str, TensorSpec]
    adapter: dict[str, Any] | None = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())


def described(pairs: Iterable[tuple[str, torch.Tensor]], end: str) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a stream; a name that comes twice raises."""
    tensors: dict[str, TensorSpec] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise ValueError(f"{end}: weight {name!r} comes twice")
        tensors[name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
    return tensors


def compare(sent: Manifest, expected: Manifest, ends: str) -> None:
    """Raise unless both manifests name the same tensors of the same shapes and dtypes, and the same adapter.

    Raises:
        ValueError: an unknown, missing or differently shaped weight, by its name.
    """
    faults = [f"unknown weight {name!r}" for name in sent.tensors if name not in expected.tensors]
    missing = [name for name in expected.tensors if name not in sent.tensors]
    if missing:
        count = f"{len(missing)} of {len(expected.tensors)} parameters"
        faults.append(f"no weights came for {count}, the first: {missing[0]!r}")
    for name, spec in sent.tensors.items():
        expected_spec = expected.tensors.get(name, spec)
        if expected_spec != spec:
            faults.append(
                f"weight {name!r}: expected {expected_spec.dtype} {expected_spec.shape}, got {spec.dtype} {spec.shape}"
            )
    if sent.adapter != expected.adapter:
        faults.append(f"adapter: expected {expected.adapter}, got {sent.adapter}")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(f"{ends}: nothing was overwritten: " + "; ".join(faults[:_SHOWN]) + more)


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
        by_entry: list[list[Claim]] = []
        for place, entry in enumerate(self.bucket.entries):
            dims = len(entry.spec.shape)
            rows = [row for row in table[:, 1 + place].tolist() if row[0]]
            by_entry.append(
                [Claim(tuple(zip(r[2 : 2 + dims], r[2 + dims : 2 + 2 * dims], strict=True)), r[1]) for r in rows]
            )
        return by_entry


class SourceFailed(RuntimeError):
    """The sending end gave up; its own error says why."""


def _claims_shape(bucket: Bucket) -> tuple[int, int]:
    dims = max(len(entry.spec.shape) for entry in bucket.entries)
    return 1 + len(bucket.entries), 2 + 2 * dims
