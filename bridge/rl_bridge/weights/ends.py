"""Both ends of a sync inside a worker, and their waits for each other. Neither raises half-way: they remember."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rl_bridge.weights.manifest import (
    Claim,
    Entry,
    Frame,
    Manifest,
    Part,
    checksum,
    described,
    full,
    inside,
    local,
    part_of,
    whole,
)
from rl_bridge.weights.receiver import Arrival, ModuleReceiver, WeightReceiver
from rl_bridge.weights.source import Through, WeightSource, needs_whole_tensors

# A collective counts its limit in whole milliseconds, and gives up that much before the deadline.
_ROUNDING = 0.01


class WeightSyncError(RuntimeError):
    """A sync failed: the message says in which slots and why. The target refuses to be used until a sync succeeds."""


class Peers:
    """Control messages between the slots of a sync: small CPU tensors over their process group.

    Every wait has a deadline, and its error names the slot that was waited for.
    """

    def __init__(self, group: dist.ProcessGroup | None, slots: Sequence[int], slot: int, title: str, timeout: float):
        """``group`` over ``slots`` in this order; None where there is only one. ``timeout``: seconds for the sync."""
        self.slots, self.slot, self.title = tuple(slots), slot, title
        self._group, self._timeout = group, timeout
        self._deadline = time.monotonic() + timeout

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective; ``what`` completes "slot 3 waited for …".

        Raises:
            WeightSyncError: the deadline passed, or a peer is gone.
        """
        try:
            work.wait(timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.title}: slot {self.slot} waited for {what}, in vain (limit {self._timeout:g} s): {error}"
            ) from error

    def roll_call(self) -> None:
        """Return when all slots are here.

        Raises:
            WeightSyncError: names the slots that did not come. Nothing has been overwritten then.
        """
        if self._group is None:
            return
        first, here = self.slots[0], torch.ones(1)
        if self.slot != first:
            self.wait(dist.isend(here, group=self._group, group_dst=0), f"the roll call of slot {first}")
            self.wait(dist.irecv(here, group=self._group, group_src=0), f"the roll call of slot {first}")
            return
        others = range(1, len(self.slots))
        calls = {i: dist.irecv(torch.zeros(1), group=self._group, group_src=i) for i in others}
        missing = []
        for i, call in calls.items():
            try:
                self.wait(call, f"slot {self.slots[i]}")
            except WeightSyncError as error:
                # The driver tells by the words of a collective's error that a death may be behind it.
                late = time.monotonic() >= self._deadline - _ROUNDING
                why = f"did not come within {self._timeout:g} s" if late else f"is lost: {error.__cause__}"
                missing.append(f"slot {self.slots[i]} {why}")
        if missing:
            raise WeightSyncError(f"{self.title}: nothing was overwritten; {'; '.join(missing)}")
        for i in others:
            self.wait(dist.isend(here, group=self._group, group_dst=i), f"slot {self.slots[i]} to hear the roll call")

    def any_failed(self, failed: bool, what: str) -> bool:
        """Whether something failed in any slot; a barrier too."""
        if self._group is None:
            return failed
        flag = torch.tensor([int(failed)])
        self.wait(dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), f"all to agree {what}")
        return bool(flag)

    def tell(self, numbers: Sequence[int], teller: int, what: str) -> list[int]:
        """The integers that the slot ``teller`` gives, in all slots."""
        if self._group is None:
            return list(numbers)
        message = torch.tensor(numbers, dtype=torch.int64)
        source = self.slots.index(teller)
        self.wait(
            dist.broadcast(message, group=self._group, group_src=source, async_op=True), f"{what} of slot {teller}"
        )
        return message.tolist()


class Description(NamedTuple):
    """One end in one slot. ``origins[i]`` is the source's tensor that name i is made from, ``parts`` what lies here."""

    manifest: Manifest
    origins: tuple[int, ...]
    parts: tuple[Part, ...]
    version: int | None


def describe_source(source: WeightSource, through: Through | None, adapter: bool) -> Description:
    """The tensors that will be sent, without their values: ``through`` is tried on meta tensors.

    Raises:
        ValueError: weights that were freed, a name that comes twice.
    """
    pairs, origins, parts = [], [], []
    for origin, (name, tensor) in enumerate(source.outline(adapter=adapter)):
        if tensor.device.type == "meta":
            raise ValueError(f"weight {name!r} has no values to send: it is on the meta device")
        parts.append(part_of(tensor))
        outgoing = [(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))]
        if through is not None:
            outgoing = list(through(*outgoing[0]))
        pairs += outgoing
        origins += [origin] * len(outgoing)
    config = source.adapter_config() if adapter else None
    return Description(Manifest(described(pairs, "source"), config), tuple(origins), tuple(parts), None)


def describe_target(receiver: WeightReceiver, adapter: bool) -> Description:
    """The tensors that the target expects, and its version."""
    pairs = list(receiver.outline(adapter=adapter))
    config = receiver.adapter_config() if adapter else None
    parts = tuple(part_of(tensor) for _, tensor in pairs)
    return Description(Manifest(described(pairs, "target"), config), (), parts, receiver.version)


class Sender:
    """Walks through the source entry by entry, together with the source's other workers."""

    def __init__(
        self,
        source: WeightSource,
        through: Through | None,
        *,
        adapter: bool,
        pieces: bool,
        gives: frozenset[int] | None,
    ) -> None:
        """``pieces``: give the local shards, otherwise whole tensors. ``gives``: the origins given (None: all)."""
        self.failure: Exception | None = None
        self._stream: Iterator[tuple[str, torch.Tensor]] | None = source.stream(adapter=adapter)
        self._through, self._pieces, self._gives = through, pieces, gives
        self._walked = 0
        self._ready: deque[tuple[str, torch.Tensor]] = deque()

    def take(self, entry: Entry) -> tuple[torch.Tensor, Part] | None:
        """The values that this worker gives for an entry and where they lie in the whole; None: others give them.

        After a failure of ``through`` the walk goes on, because the other workers gather with this one.
        """
        try:
            while self._stream is not None and self._walked <= entry.origin:
                self._walk()
        except Exception as error:
            self.failure = self.failure or error
            self._stream = None
        if self.failure is not None or not self._is_given(entry.origin):
            return None
        try:
            return self._next(entry)
        except Exception as error:
            self.failure = error
            return None

    def fill(self, frame: Frame, writer: int) -> None:
        """Copy a bucket's entries into its frame and claim them."""
        claims: dict[int, Claim] = {}
        for place, entry in enumerate(frame.bucket.entries):
            values = self.take(entry)
            if values is not None:
                tensor, part = values
                try:
                    inside(frame.tensor(entry), whole(entry.spec.shape), part).copy_(tensor)
                    claims[place] = Claim(part, checksum(tensor))
                except Exception as error:
                    self.failure = error
        frame.claim(writer, claims, failed=self.failure is not None)

    def walk(self, entries: tuple[Entry, ...]) -> None:
        """Join the gathering of entries that another worker writes."""
        for entry in entries:
            self.take(entry)

    def _is_given(self, origin: int) -> bool:
        return self._gives is None or origin in self._gives

    def _walk(self) -> None:
        assert self._stream is not None
        name, tensor = next(self._stream, ("", None))
        if tensor is None:
            raise ValueError(f"the source promised more than {self._walked} tensors, then ended")
        is_given, through = self._is_given(self._walked), self._through
        self._walked += 1
        if through is not None and not needs_whole_tensors(through):
            [(name, tensor)] = through(name, tensor)
            through = None
        if not self._pieces:
            tensor = full(tensor)
        if is_given and self.failure is None:
            try:
                self._ready.extend([(name, tensor)] if through is None else through(name, tensor))
            except Exception as error:
                self.failure = error

    def _next(self, entry: Entry) -> tuple[torch.Tensor, Part]:
        name, tensor = self._ready.popleft()
        if (name, tuple(tensor.shape), tensor.dtype) != (entry.name, *entry.spec):
            raise ValueError(f"the source promised {entry.name!r} {entry.spec}, then gave {name!r} {tensor.dtype}")
        return local(tensor), part_of(tensor)


class Taker:
    """Hands a receiver what arrives, until something fails."""

    def __init__(self, receiver: WeightReceiver, manifest: Manifest) -> None:
        """Begin: from here on the receiver's version is None."""
        self.failure: Exception | None = None
        self._receiver = receiver
        self.attempt(lambda: receiver.begin(manifest))

    def take(self, arrivals: list[Arrival]) -> None:
        """Tensors that lie in this process."""
        self.attempt(lambda: self._receiver.receive(arrivals))

    def take_frame(self, frame: Frame) -> None:
        """A bucket that arrived."""

        def receive() -> None:
            entries = zip(frame.bucket.entries, frame.claims(), strict=True)
            self._receiver.receive([Arrival(e.name, frame.tensor(e), whole(e.spec.shape), c) for e, c in entries])

        self.attempt(receive)

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Memory of the source, to be used as it is."""
        receiver = self._receiver

        def lend() -> None:
            if not isinstance(receiver, ModuleReceiver):
                raise TypeError(f"{type(receiver).__name__} cannot share the memory of its source")
            receiver.lend(name, tensor)

        self.attempt(lend)

    def finish(self) -> None:
        """Nothing more comes."""
        self.attempt(self._receiver.finish)

    def attempt(self, action: Callable[[], None]) -> None:
        """Act, unless something has failed before."""
        if self.failure is None:
            try:
                action()
            except Exception as error:
                self.failure = error
