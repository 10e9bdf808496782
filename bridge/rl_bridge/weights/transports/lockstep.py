"""The walk of channels with two buffers: bucket k is filled while bucket k - 1 is taken."""

from typing import Protocol

from rl_bridge.weights.buckets import Bucket, Frame
from rl_bridge.weights.ends import Sender, Taker


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
    """Send, take, or both. Failures of either end are remembered there, and the walk goes on for the others' sake."""
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
