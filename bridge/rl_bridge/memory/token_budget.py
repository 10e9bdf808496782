"""Training and scoring within a token budget: more while there is room, half and once more where memory was short."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from rl_bridge.memory.garbage_collection import collect_all

# The budget: more tokens a micro-batch while there is room, fewer before memory is short, half where it was short.

LEAST, MOST, START = 64, 1 << 20, 4096


@dataclass
class TokenBudget:
    """A state machine without a clock: it is told what a step took, and says what the next one may.

    >>> budget = TokenBudget()
    >>> budget.measured(base=10, peak=20, room=100, tokens=4096)
    >>> budget.tokens
    8192
    >>> budget.failed()
    True
    >>> budget.tokens, budget.ceiling
    (4096, 6144)
    """

    tokens: int = START
    """Tokens of the next micro-batches."""
    ceiling: int = MOST
    """Tokens that memory was short of once: they are not tried again."""
    failures: int = 0
    """How often memory was short."""
    share: float = field(default=0.8, kw_only=True)
    """Share of the room that a step may take, by what the last one took a token."""

    def measured(self, *, base: int, peak: int, room: int, tokens: int) -> None:
        """Learn from a step: bytes before it, at its peak, and in all; ``tokens`` of its largest micro-batch.

        The budget at most doubles, and only where a micro-batch used it: of a smaller one nothing is learnt.
        """
        if tokens < 1 or room < 1:
            return
        token_bytes = max(0, peak - base) / tokens
        fitting = int((self.share * room - base) / token_bytes) if token_bytes else 2 * self.tokens
        if fitting < self.tokens:
            self.tokens = max(LEAST, min(self.tokens, fitting))
        elif 2 * tokens >= self.tokens:
            self.tokens = min(2 * self.tokens, fitting, self.ceiling)

    def learnt(self) -> dict[str, int]:
        """All that it has learnt, for a checkpoint."""
        return {"tokens": self.tokens, "ceiling": self.ceiling, "failures": self.failures}

    def go_on(self, learnt: dict[str, int]) -> None:
        """Take back what ``learnt`` gave."""
        self.tokens, self.ceiling, self.failures = (learnt[name] for name in ("tokens", "ceiling", "failures"))

    def failed(self) -> bool:
        """Memory was short: half as many. False where there are no fewer."""
        self.failures += 1
        if self.tokens <= LEAST:
            return False
        self.ceiling = max(LEAST, 3 * self.tokens // 4)
        self.tokens = max(LEAST, self.tokens // 2)
        return True


# The memory that a step can have, and that it took, on the device where the model computes.

_CGROUP = Path("/sys/fs/cgroup")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: of a GPU, or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def in_use(device: torch.device) -> int:
    """Bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def begin_peak(device: torch.device) -> None:
    """Forget earlier peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak(device: torch.device) -> int:
    """The most bytes of this process since ``begin_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return in_use(device)


def room(device: torch.device) -> int:
    """Bytes that this process could have: what it has, and what is free, on a CPU within its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    limit, usage = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and usage.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(most) - int(usage.read_text())))
    return in_use(device) + free


# The budget around a call: memory is measured, and the call done again with half of the tokens where it was short.


def within_memory(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step`` of a trained module, which adds its whole gradient or none, and of one with a ``budget``.

    Where memory is short the step is done again with half of the budget, as long as gradients from before the call are
    not among those of the try. Workers of a mesh compute together, so that one of them cannot begin again: there the
    error is raised.
    """

    @functools.wraps(train_step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = functools.partial(self._whole, functools.partial(train_step, self, *args, **kwargs))
        if self.budget is None:
            return whole()
        return _within_budget(self, whole, again=self._mesh is None and not self._has_gradient(), learns=True)

    return step


def scores_within_memory(score: Callable[..., Any]) -> Callable[..., Any]:
    """``score`` of a module with a ``budget``, which keeps nothing for a backward pass.

    A frozen module's budget learns from it. A trained module's does not: as many tokens take less memory here than in
    a training step.
    """

    @functools.wraps(score)
    def scored(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(score, self, *args, **kwargs)
        if self.budget is None:
            return call()
        return _within_budget(self, call, again=self._mesh is None, learns=not self.trainable)

    return scored


def _within_budget(self: Any, call: Callable[[], Any], *, again: bool, learns: bool) -> Any:
    """The call, with half of the budget as often as memory is short, where it can be made ``again``."""
    place = self.compute_device()
    while True:
        begin_peak(place)
        base = in_use(place)
        try:
            result = call()
        except Exception as error:
            if not again or not is_out_of_memory(error) or not self.budget.failed():
                raise
        else:
            if learns:
                measurement = {"base": base, "peak": peak(place), "room": room(place)}
                self.budget.measured(**measurement, tokens=self.largest_micro_batch)
            return result
        # Outside of the handler, whose traceback would keep what the try allocated.
        collect(place)


def collect(place: torch.device) -> None:
    """Give back what nothing refers to."""
    collect_all()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def optimizer_within_memory(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Make an update; once more where memory was short before any parameter's update began.

    Raises:
        Exception: memory was short in the middle of the update, which cannot be made twice.
    """
    before = update_counts(optimizer)
    try:
        optimizer.step()
        return
    except Exception as error:
        if update_counts(optimizer) != before or not is_out_of_memory(error):
            raise
    collect(place)
    optimizer.step()


def update_counts(optimizer: torch.optim.Optimizer) -> dict[Any, float]:
    """How many updates were made or begun of each parameter that has had one."""
    counts = {parameter: float(state.get("step", 0)) for parameter, state in optimizer.state.items()}
    return {parameter: count for parameter, count in counts.items() if count}
