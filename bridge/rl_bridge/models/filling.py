"""Stored tensors into a model that may be sharded: each worker reads its part of each parameter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.models.stored_tensors import StoredTensors
from rl_bridge.parallel.moving import part_of

# Rotary frequencies and numbers of positions were once stored with the weights.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")


@torch.no_grad()
def fill_parameters(model: nn.Module, stored: StoredTensors) -> None:
    """Fill every parameter and persistent buffer from the tensor of its name; tied names may stand for each other.

    Raises:
        ValueError: a parameter that nothing is stored for, a stored tensor that the model does not have, another shape,
            or two tied names stored with different values: nothing has then been read but tied tensors. Or weights of
            a file that are NaN or infinite.
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
        file = stored.file_of(present[0])
        if file is not None and isinstance(target, nn.Parameter):  # a buffer may hold −inf, as masks do
            require_finite(local, present[0], file)


def require_finite(values: Tensor, name: str, file: Path) -> None:
    """Refuse weights of a file with NaN or infinity, by their least and largest number, which are NaN with any.

    Raises:
        ValueError: with the tensor, the file and how many there are.
    """
    if not values.numel() or not values.is_floating_point():
        return
    least, largest = torch.aminmax(values.detach())
    if torch.isfinite(least) and torch.isfinite(largest):
        return
    bad = int((~torch.isfinite(values)).sum())
    raise ValueError(
        f"{file}: {name!r} has {bad} of {values.numel()} numbers that are NaN or infinite in {values.dtype}: a model "
        "with such weights computes nothing; take a copy that is whole"
    )


@torch.no_grad()
def fill_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that are on the meta device, as rotary frequencies, the way transformers itself does.

    Everything else, which may be sharded, keeps its values; so does the global random state.

    Raises:
        ValueError: such a buffer that transformers does not compute.
    """
    wanted = [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if not wanted:
        return
    results = []
    with _set_aside(model, {(id(module), name) for _, module, name, _ in wanted}), torch.random.fork_rng(devices=[]):
        for background in (0, 1):  # what nobody computes shows by its background
            for _, module, name, buffer in wanted:
                module._buffers[name] = torch.full_like(buffer, background, device=device)
            _initialize(model, model)
            results.append([getattr(module, name) for _, module, name, _ in wanted])
    for (path, *_), one, other in zip(wanted, *results, strict=True):
        if one.is_meta or not torch.equal(one, other):
            raise ValueError(f"{path} of {type(model).__name__} is not stored, and nothing computes it")


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    """Have each module's model initialise the module, after its children, whose buffers it may compute.

    As ``PreTrainedModel.initialize_weights``, which takes a class that FSDP has renamed for code from elsewhere, and
    then skips what has no parameters of its own.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _initialize(child, owner)
    owner._init_weights(module)


@contextmanager
def _set_aside(model: nn.Module, but: set[tuple[int, str]]) -> Iterator[None]:
    """Stand-ins without values, which transformers takes for initialised, in place of all tensors of a model.

    ``but``: (id of a module, name) of buffers that stay.
    """
    held = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and (id(module), name) not in but:
                    held.append((tensors, name, tensor))
    try:
        for tensors, name, tensor in held:
            empty: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            tensors[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
            tensors[name]._is_hf_initialized = True
        yield
    finally:
        for tensors, name, tensor in held:
            tensors[name] = tensor


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
                    + _sizes(model)
                )
    return names


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def _sizes(model: nn.Module) -> str:
    """What the configuration says of shapes: one of its numbers is not that of the stored weights."""
    config = getattr(model, "config", None)
    sizes = [f"{name}={size}" for name in _SIZES if isinstance(size := getattr(config, name, None), int)]
    return f"; the model's config has {', '.join(sizes)}" if sizes else ""
