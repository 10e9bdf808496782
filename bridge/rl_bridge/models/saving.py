"""A model that may be sharded, written whole in Hugging Face format."""

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.weights.parts import full
from rl_bridge.weights.source import is_peft, source_of


@torch.no_grad()
def save_pretrained(model: PreTrainedModel, folder: str) -> None:
    """Write configuration and weights. All workers that hold a part call the function; the first of them writes."""
    # A model with adapters is written merged: as a plain model, which every reader knows.
    wrapped = cast(PreTrainedModel, model.get_base_model()) if is_peft(model) else model
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not meshes and wrapped is model:
        model.save_pretrained(folder)
        return
    writes = not meshes or all(place == 0 for place in meshes[0].get_coordinate() or ())
    state = {}
    for name, tensor in source_of(model).stream(adapter=False):
        # Gathered one at a time, and kept by the worker that writes alone.
        whole = full(tensor)
        if writes:
            state[name] = whole.cpu()
    if writes:
        wrapped.save_pretrained(folder, state_dict=state)
    for axis in range(meshes[0].ndim if meshes else 0):
        group = meshes[0].get_group(axis)
        if group.size() > 1:
            dist.barrier(group)
