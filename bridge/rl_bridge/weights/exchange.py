"""What runs in each slot of a sync: first the description of both ends, then the transfer."""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from rl_bridge.executors.host import Host
from rl_bridge.weights.buckets import Bucket, SourceFailed
from rl_bridge.weights.ends import Description, Sender, Taker, describe_source, describe_target
from rl_bridge.weights.manifest import Manifest
from rl_bridge.weights.parts import Part
from rl_bridge.weights.peers import Peers
from rl_bridge.weights.receiver import WeightReceiver, receiver_of
from rl_bridge.weights.source import source_of
from rl_bridge.weights.through import Through
from rl_bridge.weights.transports.broadcast import Broadcast
from rl_bridge.weights.transports.choice import Transport
from rl_bridge.weights.transports.file import carry_in_files
from rl_bridge.weights.transports.lockstep import carry
from rl_bridge.weights.transports.same_slot import copy_within
from rl_bridge.weights.transports.shared_memory import SharedMemory

# Control messages and weights have groups of their own: no collective of an engine comes between.
_PURPOSE = "weights"


def describe(
    host: Host,
    source: str | None,
    target: str | None,
    through: Through | None,
    adapter: bool,
    adapter_sent: Manifest | None = None,
) -> tuple[Description | None, Description | None]:
    """Both ends of a sync as far as they are in this slot: what is sent, what is expected.

    ``adapter_sent``: an adapter that the target is told of first.
    """
    if target and adapter_sent is not None:
        receiver_of(host.workers[target].module).expect_adapter(adapter_sent)
    sent = source and describe_source(source_of(host.workers[source].module), through, adapter)
    expected = target and describe_target(receiver_of(host.workers[target].module), adapter)
    return sent or None, expected or None


@dataclass(frozen=True)
class Job:
    """One sync as one slot sees it. ``pieces``: shards travel as they are; otherwise whole tensors, gathered.

    ``gives``: the source's tensors that this slot sends (None: all). ``writers``: the slots that write into shared
    memory, by row of claims. ``parts``: what the target holds here, by name.
    """

    title: str
    source: str
    target: str
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    transport: Transport
    version: int
    manifest: Manifest
    buckets: tuple[Bucket, ...]
    through: Through | None
    pieces: bool
    gives: frozenset[int] | None
    writers: tuple[int, ...]
    parts: dict[str, Part] | None
    share: bool
    folder: Path | None
    timeout: float


class Outcome(NamedTuple):
    """How a sync ended in one slot; ``consequence``: the failure is another slot's."""

    failure: str | None
    consequence: bool = False


def transfer(host: Host, job: Job) -> Outcome:
    """Send, receive, or both, and take the version over only if nothing failed in any slot.

    Raises:
        WeightSyncError: a slot did not come, or is gone.
    """
    slots = tuple(sorted({*job.source_slots, *job.target_slots}))
    peers = Peers(host.group(slots, "gloo", purpose=_PURPOSE), slots, host.slot, job.title, job.timeout)
    peers.roll_call()
    adapter = job.manifest.adapter is not None
    sender = taker = receiver = None
    if host.slot in job.source_slots:
        source = source_of(host.workers[job.source].module)
        sender = Sender(source, job.through, adapter=adapter, pieces=job.pieces, gives=job.gives)
    if host.slot in job.target_slots:
        receiver = receiver_of(host.workers[job.target].module)
        taker = Taker(receiver, job.manifest)
    if job.buckets:
        with torch.no_grad():
            _carry(host, job, peers, sender, taker)
    return _conclude(job, peers, sender, taker, receiver)


def _carry(host: Host, job: Job, peers: Peers, sender: Sender | None, taker: Taker | None) -> None:
    root = job.source_slots[0]
    if job.transport == "same_slot":
        assert sender is not None, "same_slot has a source worker in each slot"
        copy_within(job.buckets, sender, taker, job.parts or {}, share=job.share)
    elif job.transport == "file":
        assert job.folder is not None
        carry_in_files(job.folder, job.version, peers, root, job.buckets, sender, taker)
    elif job.transport == "shared_memory":
        row = job.writers.index(host.slot) if host.slot in job.writers else None
        carry(SharedMemory(peers, root, job.buckets, len(job.writers), row), job.buckets, sender, taker)
    else:
        reached = tuple(sorted({root, *job.target_slots}))
        group = host.group(reached, purpose=_PURPOSE) if host.slot in reached else None
        carry(Broadcast(group, reached, root, peers, job.buckets, host.device), job.buckets, sender, taker)


def _conclude(
    job: Job, peers: Peers, sender: Sender | None, taker: Taker | None, receiver: WeightReceiver | None
) -> Outcome:
    source_failed = peers.any_failed(sender is not None and sender.failure is not None, "whether the source failed")
    if taker is not None:
        if source_failed:
            taker.failure = taker.failure or SourceFailed("the source failed")
        taker.finish()
    failures = [end.failure for end in (sender, taker) if end is not None and end.failure is not None]
    if not peers.any_failed(bool(failures), "whether all arrived") and receiver is not None:
        receiver.version = job.version
    if not failures:
        return Outcome(None)
    return Outcome("".join(traceback.format_exception(failures[0])), isinstance(failures[0], SourceFailed))
