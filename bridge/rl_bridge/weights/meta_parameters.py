"""Freeing a model's weights and making room for them again, without breaking what refers to them."""

import torch


def replace_parameters(model: torch.nn.Module, device: torch.device) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Give every parameter an empty tensor on ``device`` (``meta``: none at all); returns old → new.

    Unlike ``Module.to("meta")`` and ``Module.to_empty`` it keeps tied parameters tied and leaves the buffers, which no
    transfer of weights would bring back, as they are.
    """
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if old not in replaced:
                    empty = torch.empty_like(old, device=device)
                    replaced[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
                module._parameters[name] = replaced[old]
    return replaced
