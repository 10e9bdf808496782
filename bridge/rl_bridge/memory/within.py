"""Training and scoring within the token budget: measured, and done again with half of it where memory was short."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from rl_bridge.memory import device as memory
from rl_bridge.memory.collecting import collect_all


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
        finite = self._losses_are_finite

        def undo() -> None:
            for parameter in self.trained_parameters():
                parameter.grad = None
            self._losses_are_finite = finite

        return _tried(self, functools.partial(train_step, self, *args, **kwargs), undo if clean else None, learns=True)

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
        return _tried(self, call, _nothing if self._mesh is None else None, learns=not self.trainable)

    return scored


def _tried(self: Any, call: Callable[[], Any], undo: Callable[[], None] | None, *, learns: bool) -> Any:
    """The call, with half of the budget as often as memory is short; None for ``undo``: it cannot begin again."""
    place = self.compute_device()
    while True:
        memory.begin_peak(place)
        base = memory.in_use(place)
        try:
            result = call()
        except Exception as error:
            if undo is None or not memory.is_out_of_memory(error) or not self.budget.failed():
                raise
        else:
            if learns:
                taken = {"base": base, "peak": memory.peak(place), "room": memory.room(place)}
                self.budget.measured(**taken, tokens=self.largest_micro_batch)
            return result
        # Outside of the handler, whose traceback would keep what the try allocated.
        undo()
        collect(place)


def _nothing() -> None:
    pass


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
