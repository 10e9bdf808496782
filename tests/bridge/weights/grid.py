"""Source layout x target layout x transport, by number of ranks; each combination checks every rank's weights."""

import traceback
from itertools import product
from pathlib import Path

from rl_bridge.weights import sync_weights
from rl_bridge.weights.transports import TRANSPORTS
from tests.support.weight_engines import engine, holds, joined, model

BUCKET = 4096  # several buckets, and tensors that are larger than one


def possible(transport, source, target):
    (_, slots), (_, others) = source, target
    if transport == "same_slot":
        return set(others) <= set(slots)
    return transport != "broadcast" or len({*slots, *others}) > 1


TWO = [("copies", (0,)), ("copies", (1,)), ("copies", (0, 1)), ("shard", (0, 1)), ("tensor", (0, 1))]
FOUR = [
    ("copies", (3,)),
    ("shard", (0, 1)),
    ("tensor", (2, 3)),
    ("shard", (1, 2, 3)),
    ("shard x tensor", (0, 1, 2, 3)),
    ("replicate x shard", (0, 1, 2, 3)),
]


def combinations(ends):
    return [c for c in product(TRANSPORTS, ends, ends) if possible(*c)]


def run(rank, address, queue, *, count, chosen):
    """Sync version after version in all chosen combinations; puts what went wrong."""
    host, executor = joined(rank, address, count)
    folder = Path(address.removeprefix("file://")).parent / "weights"
    faults, checked = [], 0
    wanted = {seed: model(seed) for seed in (1, 2)}
    for transport, source, target in chosen:
        try:
            sender = engine(host, "policy", *source, seed=1)
            receiver = engine(host, "rollout", *target, seed=2)
            report = sync_weights(
                executor,
                sender,
                receiver,
                version=7,
                transport=transport,
                bucket_bytes=BUCKET,
                folder=folder if transport == "file" else None,
                timeout=30,
            )
            checked += report.tensors
            wrong = holds(host, receiver, wanted[1]) + holds(host, sender, wanted[1])
            if wrong or report.buckets < 3 or report.transport != transport:
                faults.append((transport, source, target, wrong, report))
        except Exception:
            faults.append((transport, source, target, traceback.format_exc()))
            break
    queue.put((rank, checked, faults, [str(p) for p in folder.glob("**/*")]))
