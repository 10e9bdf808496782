"""What a torch module can decide for itself when an engine makes, parallelises, loads, moves and syncs it."""

from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.parallel.moving import move_weights
from rl_bridge.parallel.parts import parallelize_parts
from rl_bridge.weights.manifest import Manifest
from rl_bridge.weights.receiver import ModuleReceiver
from rl_bridge.weights.source import ModuleSource, WeightSource, is_peft, source_of


class ParallelModule(torch.nn.Module):
    """A module with a say in its own lifecycle; a plain ``torch.nn.Module`` gets the defaults.

    In each worker, in this order: the factory makes the module on the meta device, ``parallelize`` cuts its parameters
    over the mesh, ``load_weights`` gives every parameter and buffer its value, ``on_weights_materialized`` makes what
    holds on to parameters, the optimiser above all.
    """

    movable: ClassVar[tuple[str, ...]] = ("weights",)
    """What ``move`` can move."""

    device = torch.device("cpu")
    """Where the worker computes; an engine sets it before the weights come."""

    def __init__(self) -> None:
        super().__init__()
        self._home: torch.device | None = None
        self._base_is_freed = False
        self._receiver: ModuleReceiver | None = None

    def exported(self) -> torch.nn.Module:
        """The module whose weights travel to other engines, under its own names. By default this one, as a whole.

        A module around a Hugging Face model returns that model.
        """
        return self

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the parameters over ``mesh``; one worker has nothing to cut. By default FSDP2 of every sub-module."""
        parallelize_parts(self, mesh)

    def load_weights(self) -> None:
        """Give parameters and buffers their values. What is on the meta device after it gets the factory's values."""

    def on_weights_materialized(self) -> None:
        """Called once, when the weights are there."""

    def on_parameters_replaced(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Called when parameters were freed or came back: old → new. An optimiser follows them here."""

    def weights_device(self) -> torch.device:
        """Where the weights are; the CPU if there are none."""
        return device_of(self)

    def require_weights(self) -> None:
        """Raise ValueError if the weights were freed, or a sync to here failed half-way."""
        self.weight_receiver().usable_version()

    def move(self, what: str, device: torch.device) -> None:
        """Move ``what`` to ``device``; weights that go to ``meta`` are freed.

        Freed weights come back with a sync or a checkpoint; moved back without one they have no values and are refused.
        """
        if what != "weights":
            raise ValueError(f"{type(self).__name__} has no {what!r} to move; it has {', '.join(self.movable)}")
        if device.type == "meta":
            self._base_is_freed = is_peft(self.exported())
            self.weight_receiver().version = None
            self._home = self._home or self.weights_device()
        else:
            self._home = None
        self.on_parameters_replaced(move_weights(self, device))

    def make_room(self) -> None:
        """Bring freed weights back, without values, to where they were, for a sync or a checkpoint to fill."""
        if self._home is not None:
            self.move("weights", self._home)
        self._base_is_freed = False

    def weight_source(self) -> WeightSource:
        """What a sync from here sends."""
        self.require_weights()
        model = self.exported()
        return ModuleSource(self) if model is self else source_of(model)

    def weight_receiver(self) -> ModuleReceiver:
        """What a sync to here fills."""
        if self._receiver is None:
            self._receiver = _OwnReceiver(self)
        return self._receiver

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next call depends on: tensors, DTensors and plain values, nested in dictionaries."""
        self.require_weights()
        return {"module": self.state_dict()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        self.make_room()
        self.load_state_dict(state["module"])
        self.weight_receiver().version = 0


class _OwnReceiver(ModuleReceiver):
    """Makes room for freed weights before the first of them arrives."""

    def __init__(self, module: ParallelModule) -> None:
        super().__init__(module.exported())
        self._owner = module

    def begin(self, manifest: Manifest) -> None:
        if self._owner._base_is_freed:
            # A peft model takes over adapters alone, and these would lie on weights without values.
            raise ValueError("the weights under the adapter were freed, which no sync brings: load a checkpoint")
        self._owner.make_room()
        super().begin(manifest)


def device_of(module: torch.nn.Module) -> torch.device:
    """Where the parameters are; the CPU if there are none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
