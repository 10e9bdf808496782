"""Stored tensors into a model that may be sharded: each worker reads its part of each parameter."""

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.models.stored_tensors import StoredTensors
from rl_bridge.parallel.moving import part_of

# Rotary frequencies were once stored with the weights.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


@torch.no_grad()
def fill_parameters(model: nn.Module, stored: StoredTensors) -> None:
    """Fill every parameter and persistent buffer from the tensor of its name; tied names may stand for each other.

    Raises:
        ValueError: a parameter that nothing is stored for, a stored tensor that the model does not have, another shape,
            or two tied names stored with different values. Nothing has then been read but tied tensors.
    """
    names = require_fit(model, stored)
    for target, mine in names.items():
        present = [name for name in mine if name in stored.shapes]
        index = part_of(target)
        values = stored.read(present[0], index)
        for other in present[1:]:
            if not torch.equal(stored.read(other, index), values):
                raise ValueError(f"{present[0]!r} and {other!r} are one tensor in the model, but differ where stored")
        local = target.to_local() if isinstance(target, DTensor) else target
        local.copy_(values)


@torch.no_grad()
def fill_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that are on the meta device, as rotary frequencies, the way transformers itself does.

    Raises:
        ValueError: such a buffer that transformers does not compute.
    """
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if n in module._buffers]
        if not any(getattr(module, name).is_meta for name in names):
            continue
        shapes = {name: getattr(module, name) for name in names}
        results = []
        for background in (0, 1):  # what nobody computes shows by its background
            for name, shape in shapes.items():
                module._buffers[name] = torch.full_like(shape, background, device=device)
            if not any(True for _ in module.parameters(recurse=False)):  # these would be initialised too
                model._init_weights(module)
            results.append({name: getattr(module, name) for name in names})
        lost = [name for name in names if not torch.equal(results[0][name], results[1][name])]
        if lost:
            raise ValueError(f"{path}.{lost[0]} of {type(model).__name__} is not stored, and nothing computes it")


def _persistent(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def require_fit(model: nn.Module, stored: StoredTensors) -> dict[Tensor, list[str]]:
    """The names of each parameter and persistent buffer; raises ValueError where ``stored`` has not just these."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in _persistent(model):
            names.setdefault(buffer, []).append(name)
    missing = [mine[0] for mine in names.values() if not any(name in stored.shapes for name in mine)]
    known = {name for mine in names.values() for name in mine}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unknown = [
        name
        for name in sorted(set(stored.shapes) - known)
        if not _COMPUTED.search(name) and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: "
            f"{len(missing)} are not stored (the first: {missing[:3]}), {len(unknown)} are not of the model "
            f"(the first: {unknown[:3]})"
        )
    for target, mine in names.items():
        for name in mine:
            if name in stored.shapes and stored.shapes[name] != tuple(target.shape):
                raise ValueError(
                    f"{name!r}: the model's shape is {tuple(target.shape)}, stored is {stored.shapes[name]}"
                )
    return names
