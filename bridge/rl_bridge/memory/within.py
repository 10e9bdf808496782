"""A training step within the token budget: measured, and done again with half of it where memory was short."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from rl_bridge.memory import device as memory


def within_memory(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step`` of a module with a ``budget``; without one it is the method itself.

    Where memory is short the gradients of the try are dropped and the step is done again with half of the budget, as
    long as gradients from before the call are not among them. Workers of a mesh compute together, so that one of them
    cannot begin again: there the error is raised.
    """

    @functools.wraps(train_step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.budget is None:
            return train_step(self, *args, **kwargs)
        clean = self._mesh is None and all(p.grad is None for p in self.trained_parameters())
        finite, place = self._losses_are_finite, self.compute_device()
        while True:
            memory.begin_peak(place)
            base = memory.in_use(place)
            try:
                result = train_step(self, *args, **kwargs)
            except Exception as error:
                if not (clean and memory.is_out_of_memory(error) and self.budget.failed()):
                    raise
            else:
                taken = {"base": base, "peak": memory.peak(place), "room": memory.room(place)}
                self.budget.measured(**taken, tokens=self.largest_micro_batch)
                return result
            # Outside of the handler, whose traceback would keep what the try allocated.
            for parameter in self.trained_parameters():
                parameter.grad = None
            self._losses_are_finite = finite
            collect(place)

    return step


def collect(place: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def optimizer_within_memory(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Make an update; once more where memory was short before any parameter's update began.

    Raises:
        Exception: memory was short in the middle of the update, which cannot be made twice.
    """
    before = _steps(optimizer)
    try:
        optimizer.step()
        return
    except Exception as error:
        after = _steps(optimizer)
        begun = any(count != before.get(parameter, 0) for parameter, count in after.items())
        if begun or not memory.is_out_of_memory(error):
            raise
    collect(place)
    optimizer.step()


def _steps(optimizer: torch.optim.Optimizer) -> dict[Any, float]:
    return {parameter: float(state["step"]) for parameter, state in optimizer.state.items() if "step" in state}
