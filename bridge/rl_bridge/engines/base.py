"""What both engines share: an executor, a lifetime, and moves between devices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch

from rl_bridge.engines.parallel import gather, scatter
from rl_bridge.executors import resolve_executor

What = Literal["weights", "optimizer", "kv_cache"]


class Engine:
    """A worker built by an executor; a subclass says which of the worker's methods it shows."""

    movable: tuple[What, ...] = ("weights",)

    def __init__(self, worker: Any, *, executor: str = "local") -> None:
        """``worker`` is an object, or a function without arguments that makes it where the executor wants it."""
        factory: Callable[[], Any] = worker if _is_factory(worker) else lambda: worker
        self._executor = resolve_executor(executor)(factory)

    def build(self, *, colocate_with: Sequence["Engine"] = (), not_colocate_with: Sequence["Engine"] = ()) -> Self:
        """Make the workers. Placement wishes matter to executors that place workers."""
        self._executor.build([e._executor for e in colocate_with], [e._executor for e in not_colocate_with])
        return self

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every worker, ``NeedParallel`` arguments split, results joined in order."""
        return gather(self._executor.call(method, scatter(args, kwargs, self._executor.size)))

    @property
    def workers(self) -> int:
        """How many workers this engine has."""
        return self._executor.size

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._executor.device()

    def to(self, device: torch.device | str, what: What | None = None) -> Self:
        """Move weights, optimiser state or KV cache (None: all that this engine has) to a device."""
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("this process sees no CUDA or ROCm device; torch.cuda.is_available() is False")
        if what is not None and what not in self.movable:
            raise ValueError(f"{type(self).__name__} has no {what!r} to move; it has {', '.join(self.movable)}")
        for part in self.movable if what is None else (what,):
            self.call("move", part, device)
        return self

    def cuda(self, what: What | None = None) -> Self:
        """Move to the CUDA (or ROCm) device."""
        return self.to("cuda", what)

    def cpu(self, what: What | None = None) -> Self:
        """Move to host memory."""
        return self.to("cpu", what)

    def meta(self) -> Self:
        """Free the weights: shapes stay, values are gone until a sync or a checkpoint brings them back."""
        return self.to("meta", "weights")


def _is_factory(worker: Any) -> bool:
    """A class or function; a module is callable too, but it is the worker."""
    if isinstance(worker, type):
        return True
    return callable(worker) and not isinstance(worker, torch.nn.Module) and not hasattr(worker, "move")
