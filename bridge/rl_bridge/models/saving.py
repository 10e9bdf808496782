"""A model that may be sharded, written whole in Hugging Face format."""

import copy
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.weights.parts import full
from rl_bridge.weights.source import is_peft, source_of


@torch.no_grad()
def save_pretrained(model: PreTrainedModel, folder: str) -> None:
    """Write configuration and weights. All workers that hold a part call the function; the first of them writes.

    The folder is what transformers itself writes of a plain model: experts one by one, under the names of the hub. A
    model with adapters is written merged, as every reader knows it.
    """
    wrapped = cast(PreTrainedModel, model.get_base_model()) if is_peft(model) else model
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    # A parameter that tensor parallelism leaves whole knows nothing of the other tensor ranks.
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    writes = mesh is None or all(place == 0 for place in mesh.get_coordinate() or ())
    state = {}
    for name, tensor in source_of(model).stream(adapter=False):
        # Gathered one at a time, and kept by the worker that writes alone.
        whole = full(tensor)
        if writes:
            state[name] = whole.cpu()
    if writes:
        _write(wrapped, state, folder)
    for group in mesh.get_all_groups() if mesh is not None else []:
        if group.size() > 1:
            dist.barrier(group)


def _write(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: str) -> None:
    """Have a plain model of the class write the tensors: transformers goes by names of classes, which FSDP changes.

    Raises:
        RuntimeError: transformers has written nothing.
    """
    kind = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # some families look theirs up in a table of their own
    with torch.device("meta"):
        plain = kind(config).to(next(iter(state.values())).dtype)
    if model.can_generate():
        plain.generation_config = model.generation_config
    # transformers lets the first process of the world alone write, which may have no part in this engine.
    plain.should_save_on_this_rank = lambda is_main_process: True
    plain.save_pretrained(folder, state_dict=state)
    if not (Path(folder) / "config.json").is_file():
        raise RuntimeError(f"{kind.__name__}.save_pretrained wrote no config.json into {folder}")
