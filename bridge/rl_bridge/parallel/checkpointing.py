"""Gradient checkpointing: a layer keeps its inputs alone, and runs once more in the backward pass."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from rl_bridge.parallel.layers import layers_of


def checkpoint_layers(model: nn.Module) -> None:
    """Make every layer recompute its activations.

    transformers' own switch works only in training mode, which a policy without dropout never is in; a wrapper module
    would rename the parameters.

    Raises:
        ValueError: a model without layers, for which there is nothing to gain.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers to checkpoint")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
