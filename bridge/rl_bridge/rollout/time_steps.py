"""Limits of a state-space layer's time steps, in the call that adds one token.

Layers of Mamba 2's kind clamp their time steps (``time_step_limit``) where they read a sequence. Where they add one
token transformers' layers do not: a row's values would depend on which of the two calls had computed its state. The
limits are put on what the layer's projection gives.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class TimeSteps:
    """The layers of a model whose time steps have limits."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[Any] = [module for module in model.modules() if _has_limits(module)]

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Calls of the model that clamp, whatever its layers do."""
        handles = [layer.in_proj.register_forward_hook(_Limits(layer)) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Limits:
    """softplus(dt + bias) is held between the limits, where dt are the last columns of the projection."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, _: nn.Module, inputs: Any, projected: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        low, high = (_before_softplus(float(limit)) for limit in layer.time_step_limit)
        bias = layer.dt_bias.to(projected.dtype)
        before, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([before, (dt + bias).clamp(low, high) - bias], -1)


def _has_limits(module: nn.Module) -> bool:
    limits = getattr(module, "time_step_limit", None)
    projected = hasattr(module, "in_proj") and isinstance(getattr(module, "dt_bias", None), torch.Tensor)
    return limits is not None and projected and tuple(limits) != (0.0, math.inf)


def _before_softplus(x: float) -> float:
    """y with softplus(y) = x."""
    if x <= 0:
        return -math.inf
    return x + math.log(-math.expm1(-x)) if x < 30 else x
