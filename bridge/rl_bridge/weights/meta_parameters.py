"""Freeing a model's weights and making room for them again, without breaking what refers to them."""

import torch


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
