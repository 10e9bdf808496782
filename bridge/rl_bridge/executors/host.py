"""What lives in the process of a slot: the workers of the engines that share the slot."""

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_bridge.executors.errors import Progress
from rl_bridge.executors.steps import Step, concerns, not_run
from rl_bridge.executors.world import named_group
from rl_bridge.memory.collecting import collect_all


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
        self._failed: dict[int, tuple[Step, str]] = {}
        self._renewed: list[tuple[int, tuple[int, ...]]] = []

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], step: Step | None = None) -> Any:
        """``function(self, *arguments)``, which an observer may look at.

        Raises:
            OutOfStep: of a ``step`` that comes after one that failed here.
        """
        for failed, error in self._failed.values():
            if step is not None and concerns(failed, step.together):
                raise not_run(step.what, failed, error)
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
            if not purpose:
                again += [number for number, slots in self._renewed if {*members} <= {*slots}]
            name = f"rl_bridge/{key}/{again}" if again else f"rl_bridge/{key}"
            self._groups[key] = named_group(members, backend, name, self._timeout)
        return self._groups[key]

    def count_lives(self, lives: dict[int, int]) -> None:
        """``lives``: how often the process of a slot was started again. Groups with one that was are made anew."""
        begun = {slot for slot, count in lives.items() if self._lives.get(slot) != count}
        self._groups = {key: group for key, group in self._groups.items() if not begun & {*key[0]}}
        self._lives = dict(lives)

    def progress(self, step: Step | None, error: BaseException, *, completed: bool = False) -> Progress | None:
        """Note that a step failed here, and how far it came."""
        if step is None:
            return None
        if not completed:
            self._failed[step.number] = step, f"{type(error).__name__}: {error}"
        groups = self._among(step.together.slots)
        counts = {str(key): _joined(self._groups[key]) for key in groups}
        return Progress(completed, _place(error), counts)

    def forgive(self, step: Step) -> None:
        """The step failed alike in all its slots: they go on."""
        self._failed.pop(step.number, None)

    def renew(self, step: Step) -> None:
        """Let go of the process groups among the slots of a failed step: later ones are made anew.

        A peer that waits in a collective of such a group gets an error once nobody here has the group any more. So the
        workers that may have it go too: the driver refuses to call them.
        """
        slots = step.together.slots
        self._renewed.append((step.number, slots))
        self.workers = {name: worker for name, worker in self.workers.items() if not _meets(worker, slots)}
        for key in self._among(slots):
            dist.destroy_process_group(self._groups.pop(key))
        collect_all()

    def _among(self, slots: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
        """Groups of engines among these slots: one with a purpose of its own is not used in calls of an engine."""
        return [key for key in self._groups if {*key[0]} <= {*slots} and not key[1].split(" ", 1)[1]]

    def clear(self) -> None:
        """Let go of the workers and the process groups."""
        self.workers.clear()
        self._groups.clear()


def _meets(worker: Any, slots: Sequence[int]) -> bool:
    """Whether an engine's worker joins collectives with another one in these slots."""
    return getattr(worker, "group", None) is not None and len({*worker.slots} & {*slots}) > 1


def _joined(group: Any) -> int:
    """Collectives of a group that this process has joined."""
    return group._get_sequence_number_for_group()


def _place(error: BaseException) -> str:
    """File and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
