"""The modules of a model that are sharded, gathered and recomputed one at a time: its layers."""

from torch import nn
from transformers import PreTrainedModel

from rl_bridge.weights.module_tensors import is_peft


def without_peft(model: nn.Module) -> nn.Module:
    """The model that a peft model wraps, adapters inside; any other model is itself."""
    return model.get_base_model() if is_peft(model) else model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, in order: of a transformers model by its own declaration, else what direct ModuleLists hold.

    >>> layers_of(nn.Linear(2, 2))
    []
    """
    declared: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            declared |= set(module._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in declared]
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            layers += [layer for layer in child if layer not in layers]
    return layers
