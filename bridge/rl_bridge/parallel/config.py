"""How a model is parallelised, besides the mesh."""

from dataclasses import dataclass

import torch

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.parallel.checkpointing import Activations

FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Precision, memory and recomputation. The master weights keep the dtype that the model is loaded in: float32."""

    param_dtype: torch.dtype = torch.float32
    """Arithmetic of the model: gathered weights and activations."""
    reduce_dtype: torch.dtype = torch.float32
    """Arithmetic of the sums of gradients over workers."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass (ZeRO-3), or keep them for the backward pass (ZeRO-2)."""
    activations: Activations = "keep"
    """Activations that a layer keeps for its backward pass, and where."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and the optimiser's state in the host's memory."""

    def __post_init__(self) -> None:
        """Refuse dtypes that hold no gradients, or neither large activations nor small gradients."""
        check_options(self)
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) == torch.float16:
                raise ValueError(
                    f"{name}=torch.float16 ends at 65504, and loses gradients below 6e-8, as no trainer scales its "
                    "loss: torch.bfloat16 takes the same memory"
                )
            if getattr(self, name) not in FLOATS:
                raise ValueError(f"{name} must be one of {FLOATS}, got {getattr(self, name)!r}")
