"""The tensors of a module under their own names, and room made for them again, without breaking what refers to them."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from peft import PeftModel


# Freeing a model's weights and making room for them again, without breaking what refers to them.


def replace_parameters(model: torch.nn.Module, device: torch.device) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Give every parameter an empty tensor on ``device``; returns old → new.

    With ``meta`` all of them lose their values. With another device those are replaced that have none: what is on
    ``meta``. Unlike ``Module.to("meta")`` and ``Module.to_empty`` it keeps tied parameters tied and leaves the buffers,
    which no transfer of weights would bring back, as they are.
    """
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and (old.is_meta or device.type == "meta"):
                if old not in replaced:
                    empty = torch.empty_like(old, device=device)
                    replaced[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
                module._parameters[name] = replaced[old]
    return replaced


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def is_peft(module: Any) -> "TypeGuard[PeftModel]":
    """Whether this is a peft model; without peft loaded there is none."""
    return "peft" in sys.modules and isinstance(module, sys.modules["peft"].PeftModel)


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter or persistent buffer), tied ones once; FSDP2 parameters as the shards they are stored as."""
    reshard(module)
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def reshard(module: torch.nn.Module) -> None:
    """Give FSDP2 parameters their shards back.

    After a forward pass the root keeps gathered copies in the compute dtype: reading them would send rounded values,
    and what is written to them is lost.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def plain_name(name: str) -> str:
    """The name without what activation checkpointing and torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
