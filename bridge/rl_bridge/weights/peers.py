"""The slots of one sync and their waits for each other: each has a deadline and says what was missing."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class WeightSyncError(RuntimeError):
    """A sync failed: the message says in which slots and why. The target refuses to be used until a sync succeeds."""


class Peers:
    """Control messages between the slots of a sync: small CPU tensors over their process group."""

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
            except WeightSyncError:
                missing.append(self.slots[i])
        if missing:
            raise WeightSyncError(
                f"{self.title}: slots {missing} did not come within {self._timeout:g} s; nothing was overwritten"
            )
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
        told = torch.tensor(numbers, dtype=torch.int64)
        source = self.slots.index(teller)
        self.wait(dist.broadcast(told, group=self._group, group_src=source, async_op=True), f"{what} of slot {teller}")
        return told.tolist()
