"""One call that makes a model parallel: tensor parallelism, then checkpointing, then sharding."""

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rl_bridge.parallel.checkpointing import keep_activations
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.fsdp import shard_model
from rl_bridge.parallel.head import gather_head_for_logprobs
from rl_bridge.parallel.layers import without_peft
from rl_bridge.parallel.mesh import model_mesh, one_rank_mesh
from rl_bridge.parallel.tensor import cut_matrices
from rl_bridge.parallel.values import gather_head_for_values

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
    inner = without_peft(model)
    if isinstance(inner, PreTrainedModel):
        gather_head = gather_head_for_values if inner.get_output_embeddings() is None else gather_head_for_logprobs
        gather_head(cast(PreTrainedModel, model))
