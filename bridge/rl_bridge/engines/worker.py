"""One engine's share in one slot: the object the factory made, and where it stands among the engine's workers."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.engines.mesh import Mesh

DATA_RANK: ContextVar[int] = ContextVar("DATA_RANK", default=0)
"""While an engine's factory makes a worker: which share of the rows that worker will get."""

TENSOR_PARALLEL_SIZE: ContextVar[int] = ContextVar("TENSOR_PARALLEL_SIZE", default=1)
"""Likewise: what ``InferenceEngine.build`` was given."""


@dataclass
class Worker:
    """``module`` is what the factory made. One worker, or no torch module: ``mesh`` and ``group`` (of all) are None."""

    name: str
    """Of the engine."""
    module: Any
    rank: int
    """Within the engine."""
    slots: Sequence[int]
    """Slot of every rank of the engine."""
    layout: Mesh
    mesh: DeviceMesh | None
    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def size(self) -> int:
        """Workers of the engine."""
        return self.layout.size

    @property
    def data_rank(self) -> int:
        """Which share of the rows this worker gets."""
        return self.layout.data_rank(self.rank)
