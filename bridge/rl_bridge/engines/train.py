"""``TrainEngine``: the user's torch module, wherever its workers are; its weight syncs and their proof."""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.dispatch import NeedParallel
from rl_bridge.engines.engine import DEATHS, Engine, Revived, What
from rl_bridge.executors.executor import WorkerDied
from rl_bridge.weights.ends import WeightSyncError
from rl_bridge.weights.source import Through
from rl_bridge.weights.sync import EngineRef, SyncReport, sync_weights
from rl_bridge.weights.transports import Transport

# The second half of a sync to backends, such as vLLM, that prove what they took over: they draw, the trainer scores.

logger = logging.getLogger(__name__)
_ROUNDS = 4
"""Two looks at a backend, and two at a fresh one in its place."""


class Proved(NamedTuple):
    """Failures at all workers, in each backend that was replaced by one with the new weights, proved as well.

    ``not_compared``: tensors that a backend does not show, or not in a known order; its samples alone speak for them.
    """

    replaced: tuple[str, ...]
    not_compared: int


def wants_proof(target: Engine) -> bool:
    """Whether the target's workers carry weights into a backend of their own, and want its samples scored."""
    return {"take_weights", "prove_weights"} <= set(target.methods)


def require_scores(source: Engine, target: Engine) -> None:
    """Raise ValueError unless the source can score tokens."""
    lacking = {"token_logprobs", "scoring_config"} - set(source.methods)
    if lacking:
        raise ValueError(
            f"{target.name} proves its weights by log-probabilities of {source.name}, whose module has no "
            f"{' and no '.join(sorted(lacking))}; nothing was sent"
        )


def prove(source: Engine, target: Engine, version: int) -> Proved:
    """Carry the weights that came into the target's backends, and compare samples with the source's scores.

    The source's model stays cut as it is: it scores one short row.

    Raises:
        WeightSyncError: a backend did not get to these weights, or too many updates in a row needed a fresh one;
            ``target.weights_version`` says what the backends have.
    """
    with _together(source, target):
        attempts = target.call("take_weights", version, source.call("scoring_config").temperature)
        for _ in range(_ROUNDS):
            sequences = {attempt.drawn.sequence: attempt.drawn.tokens for attempt in attempts if attempt.drawn}
            if not sequences:
                break
            attempts = target.call("prove_weights", _scores(source, sequences))
    replaced = tuple(f"worker {rank}: {attempt.failure}" for rank, attempt in enumerate(attempts) if attempt.failure)
    title = f"weights of {source.name} → {target.name}, version {version}"
    if any(attempt.version != version for attempt in attempts):
        raise WeightSyncError(f"{title}: the engine went back to its last proved weights\n" + "\n".join(replaced))
    if replaced:
        logger.warning("%s: the engine was replaced by one with these weights, proved\n%s", title, "\n".join(replaced))
    return Proved(replaced, sum(attempt.not_compared for attempt in attempts))


def _scores(source: Engine, sequences: Mapping[tuple[int, ...], Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """The source's log-probabilities of the last tokens of each sequence: as many as were drawn."""
    rows = list(sequences)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        mask[place, len(row) - len(sequences[row]) : len(row)] = True
    batch = TokenBatch(tokens, mask, lengths, groups=torch.arange(len(rows)))
    logprobs = source.call("token_logprobs", NeedParallel(batch)).cpu()
    return {row: tuple(logprobs[place][mask[place]].tolist()) for place, row in enumerate(rows)}


@contextmanager
def _together(*engines: Engine) -> Iterator[None]:
    """Both engines stay at their devices: neither is sent away because the other is called."""
    before = [(engine, engine.__dict__.pop("before_call", None)) for engine in engines]
    try:
        yield
    finally:
        for engine, hook in before:
            if hook is not None:
                engine.before_call = hook


# One update: a train_step and its optimizer_step.


@contextmanager
def one_update(engine: Engine) -> Iterator[None]:
    """Around a ``train_step`` and its ``optimizer_step``: where they end early, no gradient is left for later updates.

    A worker may go on with a call that the driver did not see end, as after Ctrl-C: what that adds is dropped after it.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):  # where workers are gone or out of step, no later call is sent either
            engine.submit("zero_grad")
        raise


# The engine, called like the module itself.


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
    """Report of the last ``sync_weights`` from here."""
    replaced_engines = 0
    """Backends behind targets that syncs from here had to replace; they got the weights, proved."""
    _syncs = 0
    _calls = 0
    """Calls to the workers, without those of syncs: any of them may have changed the weights."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """``Engine.submit``, and count the call."""
        self._calls += 1
        return super().submit(method, *args, **kwargs)

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

        A backend such as vLLM also draws a few tokens, whose log-probabilities are compared with this engine's. One
        that fails is replaced by a fresh one with the new weights, which needs the same proof: ``last_sync.replaced``.

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
        target.bring_weights = partial(self._repeat, target, options, self._calls)
        assert target.brought is not None
        return target.brought

    def follow(self, reference: "TrainEngine", share: float = 1.0) -> None:
        """Let a reference take these weights: θ_ref ← share · θ + (1 − share) · θ_ref, a moving average.

        The weights come as in ``sync_weights``, each proved, and are averaged where they arrived.

        Raises:
            ValueError: a share outside (0, 1].
        """
        if not 0 < share <= 1:
            raise ValueError(f"a reference takes a share in (0, 1] of the policy's weights, got {share}")
        if share < 1:
            reference.call("copy_weights")
        self.sync_weights(reference)
        if share < 1:
            reference.call("average_weights", share)

    def _repeat(self, target: Revived, options: dict[str, Any], calls: int) -> int:
        """The last sync once more, if the weights are still those; their version. ``calls``: until that sync.

        Raises:
            ValueError: this engine was released; or it was called since, and does not say whether its weights changed.
        """
        if "weights_version" in self.methods:
            if (version := self.call("weights_version")) != target.brought:
                return version
            return self.sync_weights(target, **options)
        if self._calls != calls:
            raise ValueError(
                f"{self.name} was called since the sync, and its module does not say whether its weights changed: give "
                "it a method weights_version"
            )
        assert target.brought is not None
        syncs, self._syncs = self._syncs, target.brought - 1
        try:
            return self.sync_weights(target, **options)
        finally:
            self._syncs = syncs

    def _sync(self, target: Engine, *, through: Through | None, adapter: bool | None, **options: Any) -> int:
        calls = self._calls
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
            through=through,
            adapter=adapter,
            **options,
        )
        if proved:
            began = time.monotonic()
            proof = prove(self, target, version)
            self.replaced_engines += len(proof.replaced)
            report = report._replace(seconds=report.seconds + time.monotonic() - began, **proof._asdict())
        self._syncs, self._calls, self.last_sync = self._syncs + 1, calls, report
        return version
