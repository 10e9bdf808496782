"""How weights get from the source's processes to the target's: within a slot, shared memory, a process group, files."""

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_bridge.common.files import replacing, write_json
from rl_bridge.weights.ends import Peers, Sender, Taker, WeightSyncError
from rl_bridge.weights.manifest import Bucket, Claim, Frame, Part, aligned, checksum, inside, overlap, whole
from rl_bridge.weights.receiver import Arrival

Transport = Literal["same_slot", "shared_memory", "broadcast", "file"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


def choose_transport(
    source: Collection[int], target: Collection[int], nodes: Mapping[int, str], *, on_gpus: bool = False
) -> Transport:
    """The cheapest transport from the slots of one engine to those of another; ``nodes``: slot -> its machine.

    Beside each other in one process: no transport at all. On one machine without GPUs: memory that all map. Otherwise
    the process group, which between GPUs of one machine is faster than going through its memory.

    >>> choose_transport([0, 1], [0], {0: "a", 1: "a"})
    'same_slot'
    >>> choose_transport([0], [1], {0: "a", 1: "a"})
    'shared_memory'
    >>> choose_transport([0], [1], {0: "a", 1: "b"})
    'broadcast'
    """
    if set(target) <= set(source):
        return "same_slot"
    if len({nodes[slot] for slot in {*source, *target}}) == 1 and not on_gpus:
        return "shared_memory"
    return "broadcast"


def check_transport(
    name: str, source: Collection[int], target: Collection[int], nodes: Mapping[int, str], folder: object
) -> None:
    """Raise unless the transport can serve these slots: what was asked for is never replaced silently.

    Raises:
        ValueError: an unknown name, or what the transport lacks.
    """
    union = {*source, *target}
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name!r} is unknown; there is: {', '.join(TRANSPORTS)}")
    if name == "same_slot" and not set(target) <= set(source):
        alone = sorted(set(target) - set(source))
        raise ValueError(f"transport 'same_slot': no worker of the source is in the target's slots {alone}")
    if name == "shared_memory" and len(machines := {nodes[slot] for slot in union}) > 1:
        raise ValueError(f"transport 'shared_memory': the slots are on {len(machines)} nodes: {sorted(machines)}")
    if name == "broadcast" and len(union) == 1:
        raise ValueError(f"transport 'broadcast': both ends are in slot {min(union)} alone; use 'same_slot'")
    if (name == "file") != (folder is not None):
        raise ValueError(f"transport {name!r} with folder={folder!r}: 'file' needs one, the others none")


class Channel(Protocol):
    """Two buffers that carry buckets in turn. ``writer`` is this worker's row of claims, None: it writes nothing."""

    writer: int | None

    def acquire(self, number: int) -> None:
        """Wait until the buffer of bucket ``number`` may be overwritten."""
        ...

    def frame(self, bucket: Bucket) -> Frame:
        """The bucket in its buffer."""
        ...

    def start(self, bucket: Bucket) -> None:
        """The bucket is filled (or, at the other end, may come)."""
        ...

    def arrived(self, number: int) -> None:
        """Wait until the bucket can be read here."""
        ...


def carry(channel: Channel, buckets: tuple[Bucket, ...], sender: Sender | None, taker: Taker | None) -> None:
    """Send, take, or both: bucket k is filled while bucket k - 1 is taken.

    Either end remembers its failures, and the walk goes on for the other slots' sake.
    """
    for number in range(len(buckets) + 1):
        channel.acquire(number)
        if number < len(buckets):
            bucket = buckets[number]
            if sender is not None and channel.writer is not None:
                sender.fill(channel.frame(bucket), channel.writer)
            elif sender is not None:
                sender.walk(bucket.entries)
            channel.start(bucket)
        if number and taker is not None:
            channel.arrived(number - 1)
            taker.take_frame(channel.frame(buckets[number - 1]))


def copy_within(
    buckets: tuple[Bucket, ...],
    sender: Sender,
    taker: Taker | None,
    target_parts: dict[str, Part],
    *,
    share: bool,
) -> None:
    """Hand each tensor over within a process.

    ``target_parts``: the parts that the target holds here, by name; ``share``: hand the memory over, too.
    """
    for bucket in buckets:
        for entry in bucket.entries:
            values = sender.take(entry)
            if values is None or taker is None:
                continue
            tensor, part = values
            if share:
                taker.lend(entry.name, tensor)
                continue
            # The claim is about the part that the target takes, so that this part is proved in place.
            taken_part = overlap(part, target_parts[entry.name])
            claim = Claim(taken_part, checksum(inside(tensor, part, taken_part)))
            taker.take([Arrival(entry.name, tensor, part, [claim])])


_NONCE = 16


class SharedMemory:
    """Two buffers in anonymous memory (``memfd_create``): it has no name, so it cannot outlive its processes.

    All processes of a node map the memory, and each source worker writes its own part once. Unlike
    /dev/shm the memory is not limited to the 64 MB that containers have there.
    """

    def __init__(
        self, peers: Peers, creator: int, buckets: tuple[Bucket, ...], writers: int, writer: int | None
    ) -> None:
        """Map the memory that slot ``creator`` makes; ``writers`` source workers write, this one in row ``writer``."""
        self._peers, self._writers, self.writer = peers, writers, writer
        self._size = aligned(max(Frame.nbytes(bucket, writers) for bucket in buckets))
        self._count = len(buckets)
        memory = _mapped(peers, creator, self._size * min(2, len(buckets)) + _NONCE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def acquire(self, number: int) -> None:
        """All slots have written bucket ``number - 1`` and taken bucket ``number - 2``."""
        self._peers.any_failed(False, f"that bucket {number - 1} of {self._count} is written" if number else "to begin")

    def frame(self, bucket: Bucket) -> Frame:
        """The bucket in its buffer."""
        start = bucket.number % 2 * self._size
        return Frame(self._memory[start : start + self._size], bucket, self._writers)

    def start(self, bucket: Bucket) -> None:
        """The next ``acquire`` tells the others."""

    def arrived(self, number: int) -> None:
        """``acquire`` has waited."""


def _mapped(peers: Peers, creator: int, size: int) -> mmap.mmap:
    """The same memory in all slots. It is proved to be the same by a number that its creator writes at its end."""
    memory, problem = None, None
    file, nonce = -1, secrets.randbits(62)
    if peers.slot == creator:
        try:
            file = os.memfd_create("rl_bridge weights")
            os.ftruncate(file, size)
            memory = mmap.mmap(file, size)
            memory[-8:] = nonce.to_bytes(8, "little")
        except OSError as error:
            problem = error
    try:
        pid, number, nonce = peers.tell([os.getpid(), file, nonce], creator, "the shared memory")
        if peers.slot != creator:
            try:
                memory = _opened(f"/proc/{pid}/fd/{number}", size, nonce)
            except (OSError, ValueError) as error:
                problem = error
        # The creator's file stays open until all have mapped it.
        if peers.any_failed(problem is not None, "that the shared memory is mapped") or memory is None:
            reason = f"slot {peers.slot}: {problem}" if problem else "another slot could not map it"
            raise WeightSyncError(
                f"{peers.title}: no shared memory between these slots ({reason}); are they in different containers? "
                'transport="broadcast" needs none'
            )
        return memory
    finally:
        if file >= 0:
            os.close(file)


def _opened(path: str, size: int, nonce: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        if os.fstat(file).st_size != size:
            raise ValueError(f"{path} has {os.fstat(file).st_size} bytes, not {size}")
        memory = mmap.mmap(file, size)
    finally:
        os.close(file)
    if int.from_bytes(memory[-8:], "little") != nonce:
        raise ValueError(f"{path} is another memory")
    return memory


class Broadcast:
    """Two buffers on the process group's device, which the source's first slot broadcasts to the target's slots.

    A bucket in flight in one buffer leaves the other free.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots: tuple[int, ...],
        *,
        root: int,
        peers: Peers,
        buckets: tuple[Bucket, ...],
        device: torch.device,
    ) -> None:
        """``group`` over ``slots``, the root and all target slots: None if one slot is all, or this is none of them."""
        self._group, self._peers = group, peers
        self._group_root = slots.index(root)
        self.writer = 0 if peers.slot == root else None
        others = [slot for slot in slots if slot != root]
        self._way = f"from slot {root}" if self.writer is None else f"to reach slots {others}"
        self._works: dict[int, Any] = {}
        self._names = [f"bucket {b.number} of {len(buckets)} ({b.entries[0].name} …)" for b in buckets]
        size = max(Frame.nbytes(bucket, 1) for bucket in buckets) if peers.slot in slots else 0
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(buckets)))]

    def acquire(self, number: int) -> None:
        """The broadcast that used the buffer before has ended."""
        self.arrived(number - 2)

    def frame(self, bucket: Bucket) -> Frame:
        """The bucket in its buffer."""
        return Frame(self._buffers[bucket.number % 2], bucket, 1)

    def start(self, bucket: Bucket) -> None:
        """Send or be ready to receive; returns at once."""
        if self._group is not None:
            buffer = self.frame(bucket).buffer
            self._works[bucket.number] = dist.broadcast(
                buffer, group=self._group, group_src=self._group_root, async_op=True
            )

    def arrived(self, number: int) -> None:
        """The broadcast of a bucket has ended."""
        work = self._works.pop(number, None)
        if work is not None:
            self._peers.wait(work, f"{self._names[number]} {self._way}")


_METADATA = "rl_bridge"


def carry_in_files(
    folder: Path,
    version: int,
    peers: Peers,
    *,
    writer: int,
    buckets: tuple[Bucket, ...],
    sender: Sender | None,
    taker: Taker | None,
) -> None:
    """Slot ``writer`` writes ``folder/version-N`` in Hugging Face's layout, and removes it when all have read it.

    The folder is there whole or not at all.
    """
    path = folder / f"version-{version}"
    try:
        if sender is not None and peers.slot == writer:
            _write(path, version, buckets, sender)
        elif sender is not None:
            for bucket in buckets:
                sender.walk(bucket.entries)
        if peers.any_failed(sender is not None and sender.failure is not None, f"that {path} is written"):
            return
        if taker is not None:
            for bucket in buckets:
                taker.attempt(lambda bucket=bucket: _read(path / _name(bucket, buckets), version, bucket, taker))
        peers.any_failed(False, f"that {path} is read")
    finally:
        if peers.slot == writer and path.is_dir():
            shutil.rmtree(path)


def _name(bucket: Bucket, buckets: tuple[Bucket, ...]) -> str:
    return f"model-{bucket.number + 1:05d}-of-{len(buckets):05d}.safetensors"


def _write(path: Path, version: int, buckets: tuple[Bucket, ...], sender: Sender) -> None:
    try:
        with replacing(path) as temporary:
            temporary.mkdir()
            places: dict[str, str] = {}
            for bucket in buckets:
                tensors: dict[str, torch.Tensor] = {}
                for entry in bucket.entries:
                    values = sender.take(entry)
                    if values is not None:
                        tensors[entry.name] = values[0].contiguous().cpu()
                # A failed source still gathers with its other workers, but writes no more.
                if sender.failure is None:
                    claims = {"version": version, "checksums": {name: checksum(t) for name, t in tensors.items()}}
                    metadata = {"format": "pt", _METADATA: json.dumps(claims)}
                    save_file(tensors, temporary / _name(bucket, buckets), metadata)
                    places |= dict.fromkeys(tensors, _name(bucket, buckets))
            if sender.failure is not None:
                raise sender.failure
            write_json(temporary / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    except Exception as error:
        sender.failure = sender.failure or error


def _read(path: Path, version: int, bucket: Bucket, taker: Taker) -> None:
    try:
        _take(path, version, bucket, taker)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} was damaged on the way, or cannot be read: {error}") from error


def _take(path: Path, version: int, bucket: Bucket, taker: Taker) -> None:
    with safe_open(path, framework="pt") as file:
        claims = json.loads(file.metadata()[_METADATA])
        if claims["version"] != version:
            raise ValueError(f"{path} is of version {claims['version']}, not {version}")
        for entry in bucket.entries:
            part = whole(entry.spec.shape)
            claim = Claim(part, claims["checksums"][entry.name])
            taker.take([Arrival(entry.name, file.get_tensor(entry.name), part, [claim])])
