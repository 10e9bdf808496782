"""Weights through memory that all processes of a node map: each source worker writes its own part, once."""

import mmap
import os
import secrets

import torch

from rl_bridge.weights.buckets import Bucket, Frame, aligned
from rl_bridge.weights.peers import Peers, WeightSyncError

_NONCE = 16


class SharedMemory:
    """Two buffers in anonymous memory (``memfd_create``): it has no name, so it cannot outlive its processes.

    Unlike /dev/shm it is not limited to the 64 MB that containers have there.
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
