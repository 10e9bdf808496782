"""A sync: the driver compares both ends, plans, and runs one function in all slots. The driver sees no tensor."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_bridge.executors.executor import Arguments, Executor
from rl_bridge.executors.host import Host
from rl_bridge.weights.ends import Description, Peers, Sender, Taker, WeightSyncError, describe_source, describe_target
from rl_bridge.weights.manifest import Bucket, Manifest, Part, SourceFailed, TensorSpec, compare, plan_buckets, volume
from rl_bridge.weights.receiver import WeightReceiver, receiver_of
from rl_bridge.weights.source import Through, needs_whole_tensors, source_of
from rl_bridge.weights.transports import (
    Broadcast,
    SharedMemory,
    Transport,
    carry,
    carry_in_files,
    check_transport,
    choose_transport,
    copy_within,
)

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
    """The ends of a sync that are in this slot: the tensors that are announced, and those that are expected.

    ``adapter_sent``: an adapter that the target is told of first.
    """
    if target and adapter_sent is not None:
        receiver_of(host.workers[target].module).expect_adapter(adapter_sent)
    source_end = source and describe_source(source_of(host.workers[source].module), through, adapter)
    target_end = target and describe_target(receiver_of(host.workers[target].module), adapter)
    return source_end or None, target_end or None


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
        carry_in_files(job.folder, job.version, peers, writer=root, buckets=job.buckets, sender=sender, taker=taker)
    elif job.transport == "shared_memory":
        row = job.writers.index(host.slot) if host.slot in job.writers else None
        carry(SharedMemory(peers, root, job.buckets, len(job.writers), row), job.buckets, sender, taker)
    else:
        reached = tuple(sorted({root, *job.target_slots}))
        group = host.group(reached, purpose=_PURPOSE) if host.slot in reached else None
        way = Broadcast(group, reached, root=root, peers=peers, buckets=job.buckets, device=host.device)
        carry(way, job.buckets, sender, taker)


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


BUCKET_BYTES = 64 << 20
# The workers' own deadline comes this much before the executor's, because its message says more.
_MARGIN_SECONDS = 10.0


class EngineRef(NamedTuple):
    """An engine as the executor knows it: its name, its slots by rank, and its layout (for messages)."""

    name: str
    slots: tuple[int, ...]
    layout: Any = None

    def __str__(self) -> str:
        return self.name if self.layout is None else f"{self.name} {self.layout}"


class SyncReport(NamedTuple):
    """Account of a sync: ``nbytes`` of the whole tensors as sent, ``seconds`` with the comparison of both ends.

    ``replaced``: the failure of each engine behind the target that failed on the way and was replaced by one with
    these weights. ``not_compared``: tensors of such engines that were not compared with what was sent.
    """

    version: int
    transport: Transport
    tensors: int
    nbytes: int
    buckets: int
    seconds: float
    replaced: tuple[str, ...] = ()
    not_compared: int = 0


def sync_weights(
    executor: Executor,
    source: EngineRef,
    target: EngineRef,
    *,
    version: int,
    transport: Transport | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    through: Through | None = None,
    adapter: bool = False,
    share: bool = False,
    folder: str | Path | None = None,
    timeout: float = 600.0,
) -> SyncReport:
    """Give the target engine the source engine's weights, and prove that they arrived.

    Names, shapes and dtypes of both ends are compared first. If anything fails after that, the target's version is None
    in all its slots, so that nothing is computed with half of the weights, until a sync succeeds.

    Args:
        executor: Where both engines live.
        source: The engine that sends; all of its workers take part.
        target: The engine that receives; may have another layout, and share slots with the source.
        version: Of the weights; must not be below the target's.
        transport: None takes the cheapest that these slots allow; a name is used or refused.
        bucket_bytes: Size of a bucket; two are in memory. A larger tensor has a bucket of its own.
        through: A map over (name, whole tensor) at the source, such as ``Cast(torch.bfloat16)``; checksums are of
            what it gives.
        adapter: Send the tensors of a peft adapter under peft's names, instead of the weights with it merged.
        share: With "same_slot" and equal layouts: the target uses the source's memory. Updates of the source are then
            seen by the target at once, whatever its version says.
        folder: For "file": a folder that all slots see.
        timeout: Seconds that a slot waits for the others.

    Raises:
        ValueError: ends that do not fit together, an older version, a transport that cannot serve these slots. Nothing
            has been overwritten.
        WeightSyncError: the transfer failed; the message says in which slots and why.
    """
    began = time.monotonic()
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    title = f"weights of {source} → {target}, version {version}"
    slots = sorted({*source.slots, *target.slots})
    ask = partial(executor.call, describe, what=f"{title}: manifest", timeout=timeout)
    announced, expected = _described_ends(ask, source, target, through, adapter=adapter)
    compare(announced[source.slots[0]].manifest, expected[target.slots[0]].manifest, title)
    _require_not_older(version, expected, title)
    transport = _usable_transport(executor, source, target, transport, folder)
    plan = _Plan(announced, expected, transport, through, bucket_bytes)
    if share and not (transport == "same_slot" and plan.pieces and through is None):
        raise ValueError(
            f"{title}: share=True needs transport 'same_slot', equal layouts and no map, not {transport!r}"
        )

    def job(slot: int) -> Job:
        return Job(
            title=title,
            source=source.name,
            target=target.name,
            source_slots=tuple(source.slots),
            target_slots=tuple(target.slots),
            transport=transport,
            version=version,
            manifest=plan.manifest,
            buckets=plan.buckets,
            through=through,
            pieces=plan.pieces,
            gives=plan.gives.get(slot),
            writers=plan.writers,
            parts=_parts_by_name(expected[slot]) if slot in expected else None,
            share=share,
            folder=None if folder is None else Path(folder),
            timeout=timeout,
        )

    outcomes = executor.call(transfer, {s: (job(s),) for s in slots}, what=title, timeout=timeout + _MARGIN_SECONDS)
    _raise_failures(title, outcomes)
    seconds = time.monotonic() - began
    return SyncReport(version, transport, len(plan.manifest.tensors), plan.manifest.nbytes, len(plan.buckets), seconds)


def _described_ends(
    ask: Callable[[Arguments], dict[int, Any]],
    source: EngineRef,
    target: EngineRef,
    through: Through | None,
    *,
    adapter: bool,
) -> tuple[dict[int, Description], dict[int, Description]]:
    """Slot → what the source sends from there, and slot → what the target expects there.

    ``ask`` calls ``describe`` in slots, with its arguments in each.
    """
    adapter_sent = None
    if adapter:
        # Whoever has only the weights that an adapter belongs to learns from the source what to expect.
        of_source = ask(dict.fromkeys(source.slots, (source.name, None, through, True)))
        adapter_sent = of_source[source.slots[0]][0].manifest
    slots = sorted({*source.slots, *target.slots})
    names = {s: (source.name if s in source.slots else None, target.name if s in target.slots else None) for s in slots}
    descriptions = ask({slot: (*names[slot], through, adapter, adapter_sent) for slot in slots})
    announced = _same({slot: descriptions[slot][0] for slot in source.slots}, f"source {source}")
    expected = _same({slot: descriptions[slot][1] for slot in target.slots}, f"target {target}")
    return announced, expected


def _require_not_older(version: int, expected: Mapping[int, Description], title: str) -> None:
    for slot, description in expected.items():
        if description.version is not None and version < description.version:
            raise ValueError(
                f"{title}: stale weights: version {version} came after version {description.version} (slot {slot})"
            )


def _usable_transport(
    executor: Executor, source: EngineRef, target: EngineRef, transport: Transport | None, folder: str | Path | None
) -> Transport:
    """The transport that was asked for, or the cheapest one that these slots allow."""
    nodes = {slot.index: slot.node for slot in executor.slots}
    if transport is None and folder is None:
        ends = {*source.slots, *target.slots}
        on_gpus = any(slot.device.startswith("cuda") for slot in executor.slots if slot.index in ends)
        transport = choose_transport(source.slots, target.slots, nodes, on_gpus=on_gpus)
    transport = transport or "file"
    check_transport(transport, source.slots, target.slots, nodes, folder)
    return transport


class _Plan:
    """Who gives which tensors, in which buckets."""

    def __init__(
        self,
        announced: dict[int, Description],
        expected: dict[int, Description],
        transport: Transport,
        through: Through | None,
        bucket_bytes: int,
    ) -> None:
        root = next(iter(announced))
        self.manifest = announced[root].manifest
        rows = zip(self.manifest.tensors.items(), announced[root].origins, strict=True)
        tensors = [(name, spec, origin) for (name, spec), origin in rows]
        self.buckets: tuple[Bucket, ...] = plan_buckets(tensors, bucket_bytes)
        self.pieces = False
        if not needs_whole_tensors(through):
            self.pieces = transport == "shared_memory" or (
                transport == "same_slot" and all(_agree(announced[slot], expected[slot]) for slot in expected)
            )
        if transport == "same_slot":
            nothing = frozenset[int]()
            self.gives: dict[int, frozenset[int] | None] = {s: None if s in expected else nothing for s in announced}
        elif self.pieces:
            self.gives = dict(_givers(announced, tensors))
        else:
            self.gives = {slot: None if slot == root else frozenset() for slot in announced}
        self.writers = tuple(slot for slot, origins in self.gives.items() if origins is None or origins) or (root,)


def _same(ends: Mapping[int, Description | None], end: str) -> dict[int, Description]:
    """The descriptions of one engine's slots, which must be of the same tensors."""
    descriptions = {slot: description for slot, description in ends.items() if description is not None}
    first, *others = descriptions
    for slot in others:
        if descriptions[slot].manifest != descriptions[first].manifest:
            compare(descriptions[slot].manifest, descriptions[first].manifest, f"{end}: slots {slot} and {first}")
            raise ValueError(f"{end}: slots {slot} and {first} have the same tensors in another order")
    return descriptions


def _parts_by_name(description: Description) -> dict[str, Part]:
    return dict(zip(description.manifest.tensors, description.parts, strict=True))


def _agree(sent: Description, expected: Description) -> bool:
    """Whether both ends hold the same part of each tensor in this slot."""
    return _parts_by_name(sent) == _parts_by_name(expected)


def _givers(sent: dict[int, Description], tensors: Sequence[tuple[str, TensorSpec, int]]) -> dict[int, frozenset[int]]:
    """Which slot writes which of its parts; those that hold the same part take turns."""
    gives: dict[int, set[int]] = {slot: set() for slot in sent}
    for name, spec, origin in tensors:
        holders: dict[Part, list[int]] = {}
        for slot, description in sent.items():
            holders.setdefault(description.parts[origin], []).append(slot)
        if sum(map(volume, holders)) != spec.shape_numel:
            raise ValueError(f"weight {name!r}: the source's parts {list(holders)} do not make the whole {spec.shape}")
        for part, slots in holders.items():
            if volume(part):
                gives[slots[origin % len(slots)]].add(origin)
    return {slot: frozenset(origins) for slot, origins in gives.items()}


def _raise_failures(title: str, outcomes: Mapping[int, Outcome]) -> None:
    failed = {slot: outcome for slot, outcome in outcomes.items() if outcome.failure is not None}
    causes = {slot: outcome for slot, outcome in failed.items() if not outcome.consequence} or failed
    if causes:
        reasons = "\n".join(f"slot {slot}: {outcome.failure}" for slot, outcome in sorted(causes.items()))
        raise WeightSyncError(f"{title}: failed in slots {sorted(causes)}; the target needs another sync\n{reasons}")
