"""``TrainEngine``: the user's torch module, wherever its workers are, called like the module itself."""

from typing import ClassVar

from rl_bridge.engines.base import Engine, What
from rl_bridge.executors.host import Host


class TrainEngine(Engine):
    """Calls on the engine are calls on the module: ``engine.train_step(NeedParallel(batch))``.

    >>> from rl_bridge.engines import TrainEngine, NeedParallel
    >>> import torch
    >>> class Doubler(torch.nn.Module):
    ...     def double(self, x): return 2 * x
    >>> TrainEngine(Doubler).build().double(NeedParallel(torch.ones(2)))
    tensor([2., 2.])
    """

    movable: ClassVar[tuple[What, ...]] = ("weights", "optimizer")
    torch_module: ClassVar[bool] = True

    def sync_weights(self, target: Engine) -> int:
        """Carry the weights to another engine; returns their version, which its completions then bear."""
        version = self.call("weights_version")
        self.run(_carry, self.name, target.name, version)
        return version


def _carry(host: Host, source: str, target: str, version: int) -> None:
    weights = host.workers[source].module.named_weights()
    host.workers[target].module.update_weights(weights, version)
