"""What a torch module can decide for itself when an engine makes, parallelises, loads and moves it."""

from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.weights.meta_parameters import replace_parameters


def device_of(module: torch.nn.Module) -> torch.device:
    """Where the parameters are; the CPU if there are none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def move_weights(module: torch.nn.Module, device: torch.device) -> None:
    """Move parameters and buffers. ``meta`` frees the parameters, which have no values when they come back."""
    if "meta" in (device.type, device_of(module).type):
        replace_parameters(module, device)
    if device.type != "meta":
        module.to(device=device)


class ParallelModule(torch.nn.Module):
    """A module with a say in its own lifecycle; a plain ``torch.nn.Module`` gets the defaults.

    In each worker, in this order: the factory makes the module on the meta device, ``parallelize`` cuts its parameters
    over the mesh, ``load_weights`` gives every parameter and buffer its value, ``on_weights_materialized`` makes what
    holds on to parameters, the optimiser above all.
    """

    movable: ClassVar[tuple[str, ...]] = ("weights",)
    """What ``move`` can move."""

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the parameters over ``mesh``; one worker has nothing to cut. By default FSDP2 of the whole module."""
        from rl_bridge.parallel.plan import parallelize

        parallelize(self, mesh)

    def load_weights(self) -> None:
        """Give parameters and buffers their values. What is on the meta device after it gets the factory's values."""

    def on_weights_materialized(self) -> None:
        """Called once, when the weights are there."""

    def weights_device(self) -> torch.device:
        """Where the weights are; the CPU if there are none."""
        return device_of(self)

    def move(self, what: str, device: torch.device) -> None:
        """Move ``what`` to ``device``; weights that go to ``meta`` are freed."""
        if what != "weights":
            raise ValueError(f"{type(self).__name__} has no {what!r} to move; it has {', '.join(self.movable)}")
        move_weights(self, device)

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next call depends on: tensors, DTensors and plain values, nested in dictionaries."""
        return {"module": self.state_dict()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        self.load_state_dict(state["module"])
