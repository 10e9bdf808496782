"""Weights over a process group: the source's first slot broadcasts buckets to the target's slots."""

from typing import Any

import torch
import torch.distributed as dist

from rl_bridge.weights.buckets import Bucket, Frame
from rl_bridge.weights.peers import Peers


class Broadcast:
    """Two buffers on the device of the process group; what is in flight in one leaves the other free."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots: tuple[int, ...],
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
