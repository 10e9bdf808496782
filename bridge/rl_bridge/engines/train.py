"""``TrainEngine``: the user's module, run by an executor, called like the module itself."""

from collections.abc import Callable
from typing import Any

from rl_bridge.engines.base import Engine, What
from rl_bridge.engines.inference import InferenceEngine


class TrainEngine(Engine):
    """Calls on the engine are calls on the module: ``engine.train_step(NeedParallel(batch))``.

    >>> from rl_bridge.engines import TrainEngine, NeedParallel
    >>> import torch
    >>> class Doubler(torch.nn.Module):
    ...     def double(self, x): return 2 * x
    >>> TrainEngine(Doubler()).build().double(NeedParallel(torch.ones(2)))
    tensor([2., 2.])
    """

    movable: tuple[What, ...] = ("weights", "optimizer")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A public name that the engine does not have is a method of the module."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint of the module holds."""
        return self.call("training_state")

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Give the module back what its ``training_state`` was."""
        self.call("load_training_state", state)

    def sync_weights(self, inference: InferenceEngine) -> int:
        """Carry the weights to an inference engine; returns their version, which its completions then bear."""
        version = self.call("weights_version")
        inference.update_weights(self.call("named_weights"), version)
        return version
