"""A user's module made parallel: each of its sub-modules for itself, because its methods call them one by one."""

from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.layers import without_peft
from rl_bridge.parallel.plan import DEFAULT, parallelize


def parallelize_parts(module: nn.Module, mesh: DeviceMesh, config: ParallelConfig = DEFAULT) -> None:
    """Make every sub-module of ``module`` that a method can call parallel over ``mesh``.

    FSDP gathers the parameters of what is called. A method such as ``train_step`` is no call of the module itself, so
    the module is not one piece: its children are, and the entries of its lists.

    Raises:
        ValueError: a parameter that belongs to the module itself, or to two of its sub-modules. Only a ``parallelize``
            of the module's own can tell what is to become of it.
    """
    if isinstance(without_peft(module), PreTrainedModel):
        parallelize(module, mesh, config)
        return
    parts = callable_parts(module)
    inside = Counter(id(parameter) for _, part in parts for parameter in part.parameters())
    names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
    for parameter, name in names.items():
        if inside[parameter] != 1:
            where = "no sub-module" if not inside[parameter] else f"{inside[parameter]} sub-modules"
            raise ValueError(
                f"parameter {name!r} of {type(module).__name__} belongs to {where}: "
                "several workers need a parallelize() of the module's own"
            )
    for _, part in parts:
        parallelize(part, mesh, config)


def callable_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children with parameters, by name; lists and dictionaries of modules are their entries."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += [(f"{name}.{inner}", part) for inner, part in callable_parts(child)]
        elif next(child.parameters(), None) is not None:
            parts.append((name, child))
    return parts
