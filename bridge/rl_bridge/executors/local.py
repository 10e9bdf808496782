"""One worker, in this process: what a single device needs, and what a debugger can step into."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_bridge.executors.base import Executor


class LocalExecutor:
    """The worker is the user's own module, called directly."""

    size = 1

    def __init__(self, factory: Callable[[], Any]) -> None:
        """Keep the factory; nothing is made before ``build``."""
        self._factory = factory
        self._worker: Any = None

    def build(self, colocate_with: Sequence[Executor], not_colocate_with: Sequence[Executor]) -> None:
        """Make the worker. Everything shares this process, so a wish to be apart cannot be met and raises."""
        if self._worker is not None:
            raise ValueError("this engine is built already")
        if not_colocate_with:
            raise ValueError("executor 'local' places all engines in one process: not_colocate_with cannot be met")
        self._worker = self._factory()

    def call(self, method: str, shares: Sequence[tuple[tuple, dict]]) -> list[Any]:
        """Call the worker's method with the one share there is."""
        if self._worker is None:
            raise ValueError(f"call build() before {method}()")
        function = getattr(self._worker, method, None)
        if not callable(function):
            raise AttributeError(f"{type(self._worker).__name__} has no method {method!r}")
        [(args, kwargs)] = shares
        return [function(*args, **kwargs)]

    def device(self) -> torch.device:
        """Where the worker's weights are."""
        [device] = self.call("weights_device", [((), {})])
        return device
