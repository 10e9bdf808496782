"""The sending end: weights under their Hugging Face names, whole or sharded."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from rl_bridge.weights.module_tensors import is_peft, module_tensors

if TYPE_CHECKING:
    pass

_IN_CHARGE = "_rl_bridge_in_charge"


class WeightSource(Protocol):
    """What an engine sends. All workers of the engine walk through it together and in the same order."""

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Names, and tensors whose shape, dtype and placement are those of the stream; their values do not count."""
        ...

    def stream(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The same names with values: plain tensors are whole and equal on all workers, DTensors are sharded."""
        ...

    def adapter_config(self) -> dict[str, Any]:
        """The configuration that travels with ``adapter=True``; a source without adapters raises ValueError."""
        ...


@runtime_checkable
class SendsWeights(Protocol):
    """A module that says itself what it sends, because its own parameters are not the Hugging Face model's."""

    def weight_source(self) -> WeightSource:
        """The weights, under the names that the other end knows."""
        ...


class ModuleSource:
    """All parameters (tied ones once, under their first name) and persistent buffers of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        """``module``: plain, or sharded by FSDP2 and DTensor tensor parallelism."""
        self._module = module

    def outline(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own tensors."""
        if adapter:
            self.adapter_config()
        return module_tensors(self._module)

    def stream(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own tensors, detached.

        Raises:
            ValueError: the weights were freed.
        """
        for name, tensor in self.outline(adapter=adapter):
            if tensor.device.type == "meta":
                raise ValueError(f"weight {name!r} has no values here: it is on the meta device")
            yield name, tensor.detach()

    def adapter_config(self) -> dict[str, Any]:
        """There is none."""
        raise ValueError(f"adapter=True needs a peft model, got {type(self._module).__name__}")


def source_of(module: Any) -> WeightSource:
    """The source of an engine's module: what the module says, a peft model's, or the module's own tensors."""
    owner = in_charge_of(module)
    if isinstance(owner, SendsWeights):
        return owner.weight_source()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{type(module).__name__} sends no weights: it is no torch module and has no weight_source()")
    return own_source(module)


def put_in_charge(owner: Any, module: torch.nn.Module) -> None:
    """Let ``owner`` say what a module sends and takes that does not say so itself."""
    vars(module)[_IN_CHARGE] = owner


def in_charge_of(module: Any) -> Any:
    """What was put in charge of a module, or else the module."""
    return vars(module).get(_IN_CHARGE, module) if isinstance(module, torch.nn.Module) else module


def own_source(module: torch.nn.Module) -> WeightSource:
    """A peft model's weights, or the module's own tensors."""
    if is_peft(module):
        from rl_bridge.weights.lora import PeftSource

        return PeftSource(module)
    return ModuleSource(module)
