"""What lives in the process of a slot: the workers of the engines that share the slot."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_bridge.executors.world import named_group


class Host:
    """The workers in one slot, its device, and the process groups that the slot belongs to."""

    def __init__(self, slot: int, device: torch.device | str = "cpu", *, group_timeout: float = 600.0) -> None:
        """``group_timeout``: seconds after which a collective that a peer does not join fails."""
        self.slot = slot
        self.device = torch.device(device)
        self.workers: dict[str, Any] = {}
        self.observer: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
        """What runs the functions in place of ``run``, such as a memory profiler that measures around them."""
        self._timeout = timedelta(seconds=group_timeout)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._lives: dict[int, int] = {}

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """``function(self, *arguments)``, which an observer may look at."""
        return function(self, *arguments) if self.observer is None else self.observer(function, arguments)

    def group(self, slots: Sequence[int], backend: str | None = None, *, purpose: str = "") -> dist.ProcessGroup | None:
        """The process group over ``slots``, in this order; None for a single slot. All of them call it, none else.

        A group is made once: two calls with the same slots, backend and ``purpose`` share one.

        Raises:
            ValueError: this slot is not among ``slots``, or the process has not joined the others.
        """
        members = tuple(slots)
        if self.slot not in members:
            raise ValueError(f"slot {self.slot} asked for a process group of slots {list(members)}")
        if len(members) == 1:
            return None
        if not dist.is_initialized():
            raise ValueError(f"slots {list(members)} need a process group, and this executor has a single process")
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        key = (members, f"{backend} {purpose}")
        if key not in self._groups:
            again = [(slot, self._lives[slot]) for slot in members if slot in self._lives]
            name = f"rl_bridge/{key}/{again}" if again else f"rl_bridge/{key}"
            self._groups[key] = named_group(members, backend, name, self._timeout)
        return self._groups[key]

    def count_lives(self, lives: dict[int, int]) -> None:
        """``lives``: how often the process of a slot was started again. Groups with one that was are made anew."""
        begun = {slot for slot, count in lives.items() if self._lives.get(slot) != count}
        self._groups = {key: group for key, group in self._groups.items() if not begun & {*key[0]}}
        self._lives = dict(lives)

    def clear(self) -> None:
        """Let go of the workers and the process groups."""
        self.workers.clear()
        self._groups.clear()
