"""Classes of transformers that vLLM computes with itself: the trainer's models keep their own.

For families without a model of its own (OLMo 2 and 3, SmolLM3, GPT-NeoX, …) vLLM takes the class from transformers, and
changes the class: each later model of that class asks for vLLM's configuration, and one that is there already cannot be
called. Here the class gets back what it was, and the engine's modules a class of their own with what vLLM put in.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

Changed = dict[type, type]
"""By class of transformers, the class that the engine's modules get."""


@contextmanager
def classes_kept() -> Iterator[Changed]:
    """Inside, vLLM changes classes of transformers; afterwards these are as before, and the dictionary is filled."""
    from vllm.compilation import decorators

    change, before, own = decorators._support_torch_compile, {}, {}

    def recorded(cls: type, *args: Any, **kwargs: Any) -> type:
        if issubclass(cls, PreTrainedModel) and cls not in before:
            before[cls] = cls.__bases__, dict(vars(cls))
        return change(cls, *args, **kwargs)

    decorators._support_torch_compile = recorded
    try:
        yield own
    finally:
        decorators._support_torch_compile = change
        for cls, (bases, attributes) in before.items():
            new = {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
            added = tuple(base for base in cls.__bases__ if base not in bases)
            cls.__bases__ = bases
            for name in new:
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)
            own[cls] = type(cls.__name__, (cls, *added), new | {"__module__": cls.__module__})


def take(model: torch.nn.Module, own: Changed) -> None:
    """Give the engine's modules their classes."""
    for module in model.modules():
        if type(module) in own:
            module.__class__ = own[type(module)]
