"""The contract between an engine and the place where its workers live."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Executor(Protocol):
    """Holds ``size`` workers built by one factory and calls a method on all of them, in order of rank."""

    size: int

    def __init__(self, factory: Callable[[], Any]) -> None: ...

    def build(self, colocate_with: Sequence["Executor"], not_colocate_with: Sequence["Executor"]) -> None:
        """Make the workers; a second call raises."""
        ...

    def call(self, method: str, shares: Sequence[tuple[tuple, dict]]) -> list[Any]:
        """Call ``method`` on worker i with the arguments ``shares[i]``; results in order of rank."""
        ...

    def device(self) -> torch.device:
        """Where the first worker's weights are."""
        ...
