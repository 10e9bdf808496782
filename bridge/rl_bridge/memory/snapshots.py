"""The host memory that a checkpoint's copies take."""

from typing import Any

import torch

from rl_bridge.checkpoints.snapshot import local_values, state_of
from rl_bridge.checkpoints.tree import take_apart
from rl_bridge.memory.live import LiveBytes
from rl_bridge.memory.places import CHECKPOINT


def snapshot_tensors(live: LiveBytes, module: Any) -> list[torch.Tensor]:
    """Arrays as ``HostBuffers`` keeps them: one for each tensor of the module's state, tied ones as often as named."""
    _, tensors = take_apart(state_of("plan", module))
    copies = [torch.empty_like(local_values(tensor), device="cpu") for tensor in tensors.values()]
    for copy in copies:
        live.track(copy, CHECKPOINT)
    return copies
