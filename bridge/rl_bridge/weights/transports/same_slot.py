"""Weights within a process: every target worker has a worker of the source beside it."""

from rl_bridge.weights.bits import checksum
from rl_bridge.weights.buckets import Bucket, Claim
from rl_bridge.weights.ends import Sender, Taker
from rl_bridge.weights.parts import Part, inside, overlap
from rl_bridge.weights.receiver import Arrival


def copy_within(
    buckets: tuple[Bucket, ...],
    sender: Sender,
    taker: Taker | None,
    target_parts: dict[str, Part],
    *,
    share: bool,
) -> None:
    """Hand each tensor over. ``target_parts``: what the target holds here, by name; ``share``: its memory too."""
    for bucket in buckets:
        for entry in bucket.entries:
            given = sender.take(entry)
            if given is None or taker is None:
                continue
            tensor, part = given
            if share:
                taker.lend(entry.name, tensor)
                continue
            # Claimed is what the target takes, so that it is proved in place.
            mine = overlap(part, target_parts[entry.name])
            claim = Claim(mine, checksum(inside(tensor, part, mine)))
            taker.take([Arrival(entry.name, tensor, part, [claim])])
