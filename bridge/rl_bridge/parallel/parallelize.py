"""One call that makes a model parallel: tensor parallelism, then checkpointing, then sharding."""

from collections import Counter
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rl_bridge.parallel.checkpointing import keep_activations
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.fsdp import shard_model
from rl_bridge.parallel.heads import gather_head
from rl_bridge.parallel.mesh import model_mesh, one_rank_mesh
from rl_bridge.parallel.tensor_parallel import cut_matrices
from rl_bridge.weights.manifest import without_peft

DEFAULT = ParallelConfig()


def parallelize(
    model: nn.Module, mesh: DeviceMesh | None, config: ParallelConfig = DEFAULT, *, device_type: str = "cpu"
) -> None:
    """Make ``model`` parallel over ``mesh``, in place; its parameters become DTensors.

    The model is on the meta device (its weights come later) or already on the mesh's device with equal weights on all
    workers. One worker (``mesh`` None) needs FSDP only for what it does besides: another ``param_dtype``, offload.

    Args:
        model: a transformers or peft model, or any module: its layers are then what its direct ModuleLists hold.
        mesh: of ``make_mesh``.
        config: precision, resharding, checkpointing, offload.
        device_type: "cpu" or "cuda", where there is no mesh to tell.

    Raises:
        ValueError: tensor parallelism for a model without a plan, with sizes that do not divide, or with adapters.
    """
    if mesh is not None and mesh["tensor"].size() > 1:
        cut_matrices(model, model_mesh(mesh)["tensor"])
    keep_activations(model, config.activations)
    same_dtype = all(parameter.dtype == config.param_dtype for parameter in model.parameters())
    if mesh is None and same_dtype and not config.cpu_offload:
        return
    shard_model(model, one_rank_mesh(device_type) if mesh is None else model_mesh(mesh), config)
    if isinstance(without_peft(model), PreTrainedModel):
        gather_head(cast(PreTrainedModel, model))


# A user's module made parallel: each of its sub-modules for itself, because its methods call them one by one.


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
