"""``TrainEngine``: the user's torch module, wherever its workers are, called like the module itself."""

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rl_bridge.engines.base import Engine, What
from rl_bridge.engines.reviving import DEATHS, Revived
from rl_bridge.executors.errors import WorkerDied
from rl_bridge.weights.proving import prove, require_scores, wants_proof
from rl_bridge.weights.sync import EngineRef, SyncReport, sync_weights
from rl_bridge.weights.through import Through
from rl_bridge.weights.transports.choice import Transport


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
    last_sync: SyncReport | None = None
    """What the last ``sync_weights`` from here did."""
    replaced_engines = 0
    """Engines behind targets that syncs from here had to replace; they got the weights, proved."""
    _syncs = 0

    def sync_weights(
        self,
        target: Engine,
        *,
        transport: Transport | None = None,
        through: Through | None = None,
        adapter: bool | None = None,
        share: bool = False,
        folder: str | Path | None = None,
        timeout: float = 600.0,
    ) -> int:
        """Carry the weights to another engine and prove that they arrived; returns their version.

        An engine of vLLM also draws a few tokens, whose log-probabilities are compared with this engine's own. One that
        fails is replaced by a fresh one with the new weights, which needs the same proof: ``last_sync.replaced``.

        The version is what the module's ``weights_version`` says; of a module without that method, the number of this
        sync. ``transport`` is chosen from where both engines are unless it is named; ``through`` maps the weights on
        the way, such as ``Cast(torch.bfloat16)``: None is what the target's workers say with ``weights_map``, as those
        of a quantised rollout do. ``adapter``: send a LoRA adapter as such; None is as the target's workers take it.
        ``timeout``: seconds that a worker waits for the others.
        See ``rl_bridge.weights.sync_weights`` for the rest and the errors.
        """
        options = {"transport": transport, "through": through, "adapter": adapter, "share": share, "folder": folder}
        options["timeout"] = timeout
        if not isinstance(target, Revived):
            return self._sync(target, **options)
        for deaths in itertools.count(1):
            target.require_alive()
            try:
                target.brought = self._sync(target, **options)
            except WorkerDied:
                if deaths > DEATHS or not set(self.executor.dead()) & set(target.slots):
                    raise
            else:
                break
        target.bring_weights = partial(self._repeat, target, options)
        assert target.brought is not None
        return target.brought

    def _repeat(self, target: Revived, options: dict[str, Any]) -> int:
        """The last sync once more, if the weights are still those; their version.

        Raises:
            ValueError: this engine was released.
        """
        if "weights_version" not in self.methods:
            self._syncs -= 1
        elif (version := self.call("weights_version")) != target.brought:
            return version
        return self.sync_weights(target, **options)

    def _sync(
        self,
        target: Engine,
        *,
        transport: Transport | None,
        through: Through | None,
        adapter: bool | None,
        share: bool,
        folder: str | Path | None,
        timeout: float,
    ) -> int:
        for engine in (self, target):
            engine.require_in_step("sync_weights")
        version = self._syncs + 1
        if adapter is None:
            adapter = "takes_adapter" in target.methods and bool(target.call("takes_adapter"))
        if "weights_version" in self.methods:
            version = self.call("weights_version")
        proved = wants_proof(target)
        if proved:
            require_scores(self, target)
        if through is None and not adapter and "weights_map" in target.methods:
            through = target.call("weights_map")
        if self.before_call is not None:
            self.before_call(self, target)
        report = sync_weights(
            self.executor,
            EngineRef(self.name, tuple(self.slots), self.mesh),
            EngineRef(target.name, tuple(target.slots), target.mesh),
            version=version,
            transport=transport,
            through=through,
            adapter=adapter,
            share=share,
            folder=folder,
            timeout=timeout,
        )
        if proved:
            began = time.monotonic()
            proof = prove(self, target, version)
            self.replaced_engines += len(proof.replaced)
            report = report._replace(seconds=report.seconds + time.monotonic() - began, **proof._asdict())
        self._syncs, self.last_sync = self._syncs + 1, report
        return version
