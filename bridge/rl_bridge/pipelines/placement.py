"""The processes and engines of a pipeline: options of the command line, and a method for each engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import remarks, tell
from rl_bridge.engines import InferenceEngine, Mesh, TrainEngine
from rl_bridge.engines.engine import Engine, Turns
from rl_bridge.executors import Executor
from rl_bridge.executors.host import Host
from rl_bridge.executors.session import current_executor, init
from rl_bridge.models.export_rehearsal import rehearse_export
from rl_bridge.models.exported_files import ExportDtype, ExportTypes, export_types
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.comparison import ComparisonLoss, CompletionScorer, PreferenceModule, RewardModule
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import Scorer, ScoringConfig, TokenScorer
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.modules.value import ValueModule
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.run.options import MAY_CHANGE
from rl_bridge.run.run import Run


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """How the trainer's workers are arranged."""

    replicate: int = 1
    """Copies of the model, each with rows of its own."""
    shard: int | None = None
    """Workers that a copy's parameters and optimiser are cut over, each with its own rows. None: all that are left."""
    tensor: int = 1
    """Workers that each matrix is cut over."""
    sequence: int = 1
    """Workers that the tokens of the same rows are cut over."""

    def __post_init__(self) -> None:
        """Refuse an axis without a rank."""
        check_options(self)
        for axis in ("replicate", "shard", "tensor", "sequence"):
            ranks = getattr(self, axis)
            if ranks is not None and ranks < 1:
                raise ValueError(f"every axis of a mesh has at least one rank, got {axis} {ranks}")

    def of(self, workers: int) -> Mesh:
        """The mesh of ``workers`` workers.

        >>> MeshOptions(tensor=2).of(4)
        Mesh(replicate=1, shard=2, tensor=2, sequence=1)

        Raises:
            ValueError: the mesh needs more workers, or leaves some out.
        """
        others = self.replicate * self.tensor * self.sequence
        shard = max(1, workers // others) if self.shard is None else self.shard
        mesh = Mesh(replicate=self.replicate, shard=shard, tensor=self.tensor, sequence=self.sequence)
        if mesh.size != workers:
            shape = " × ".join(f"{name} {size}" for name, size in vars(mesh).items())
            raise ValueError(f"the mesh of {shape} is of {mesh.size} workers, and there are {workers}")
        return mesh


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """The processes of a run."""

    executor: Literal["auto", "local", "torchrun", "ray"] = field(default="auto", metadata=MAY_CHANGE)
    """auto: what RL_BRIDGE_EXECUTOR says, else the ranks of a torchrun job where there is one, else this process."""
    workers: int | None = field(default=None, metadata=MAY_CHANGE)
    """Processes that Ray starts. Another executor starts none: this must be the number that it has, or None."""
    mesh: MeshOptions = field(default=MeshOptions(), metadata=MAY_CHANGE)

    def start(self) -> Executor:
        """The executor of the run. Under torchrun only rank 0 gets one: the other ranks serve until the run ends."""
        remarks()  # Forgets the remarks of a run that ended before it had a record.
        if self.executor == "auto" and self.workers is None:
            return current_executor()
        return init(None if self.executor == "auto" else self.executor, workers=self.workers)


def workers_left(workers: int, apart: int) -> int:
    """Workers that train, of all ``workers``, where the rollout has so many to itself.

    Raises:
        ValueError: there are none left.
    """
    if apart >= workers:
        raise ValueError(
            f"--asynchronous.rollout-workers {apart}: of the executor's {workers} workers none is left that trains; "
            f"give fewer, or {apart + 1} workers at least: --executor ray --workers {apart + 1}, or torchrun with "
            f"--nproc-per-node {apart + 1}"
        )
    return workers - apart


AnEngine = TypeVar("AnEngine", bound=Engine)


def set_threads(host: Host, threads: int) -> None:
    """Set the CPU threads of a worker's process."""
    torch.set_num_threads(threads)


def threads_of(host: Host) -> int:
    """The CPU threads of a worker's process."""
    return torch.get_num_threads()


def keep_threads(run: Run, executor: Executor, chosen: int | None = None) -> None:
    """Give a resumed run the numbers of threads that it began with: with others, sums are in another order.

    ``chosen``: the number that the user has named for this session, which stays.
    """
    slots = [slot.index for slot in executor.slots]
    by_slot = executor.call(threads_of, dict.fromkeys(slots, ()), what="threads_of", timeout=60)
    now = [torch.get_num_threads(), *(by_slot[slot] for slot in slots)]
    before = run.cached_result("threads", lambda: now)
    if before == now or len(before) != len(now):
        return
    if chosen is not None:
        run.note(f"the run began with {before[0]} CPU threads and has {now[0]} now: its sums may round otherwise")
        return
    tell(f"{before[0]} CPU threads as at the beginning of the run, where this process would take {now[0]}")
    torch.set_num_threads(before[0])
    threads = {slot: (number,) for slot, number in zip(slots, before[1:], strict=True)}
    executor.call(set_threads, threads, what="set_threads", timeout=60)


class Engines:
    """Makes the engines of a run, all over the same workers: in turns. On leaving the context it releases them."""

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        source: ModelSource,
        parallel: ParallelConfig,
        *,
        run: str = "",
        trained: ModelSource | None = None,
        turns: Turns | None = None,
    ) -> None:
        """``mesh`` is of the trainers: policy, reference and warm start. The engines' names begin with ``run``.

        ``trained`` is the source of the trained models, where these have adapters or frozen parameters: the rollout
        and the reference are of the plain ``source``, and get adapters merged. ``turns``: those in which an engine
        that does not work waits in host memory.
        """
        self._run, self.trained = run, source if trained is None else trained
        self.executor, self.mesh, self.source, self.parallel = executor, mesh, source, parallel
        self.rollout_workers: int | None = None
        """Slots that the rollout has to itself. None: every slot has the rollout and all other engines."""
        self.apart: Sequence[Engine] = ()
        """Engines of somebody else, in whose slots no model is trained or scored."""
        self.types = ExportTypes()
        """The dtypes that the trained model is exported in."""
        self._engines: list[Engine] = []
        self.notes: list[str] = []
        """Notes of the engines made so far: where rows lie otherwise than asked for, and why."""
        self.tell: Callable[[str], None] = tell
        """Called once with each of the notes."""
        self._turns = turns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self._engines:
            if engine.slots:
                engine.release()

    def rehearse_export(
        self, tokenizer: PreTrainedTokenizerBase, dtype: ExportDtype, *, rehearsed: bool = False
    ) -> None:
        """Write and read back the files of the untrained model, and keep the ``types`` that it will be exported in.

        ``rehearsed``: somebody has written and read them; the types alone are kept.

        Raises:
            ValueError: what could not be exported after the training.
        """
        self.types = export_types(self.source, dtype)
        if not rehearsed:
            rehearse_export(self.trained, tokenizer, self.types)

    def supervised(self, optimizer: OptimizerConfig, *, updates: int, scoring: ScoringConfig) -> TrainEngine:
        """The engine of the warm start."""
        return self._train("supervised", SupervisedModule, self.trained, optimizer, updates=updates, scoring=scoring)

    def policy(
        self,
        optimizer: OptimizerConfig,
        objective: rl_fn.Objective,
        *,
        updates: int,
        scoring: ScoringConfig,
        fused_loss: bool = False,
    ) -> TrainEngine:
        """The engine of reinforcement learning."""
        options = {"updates": updates, "scoring": scoring, "fused_loss": fused_loss}
        return self._train("policy", PolicyModule, self.trained, optimizer, objective, **options)

    def reference(self, scoring: ScoringConfig) -> TrainEngine:
        """A frozen model that scores as the policy does."""
        return self._train("reference", TokenScorer, self.source, scoring)

    def preference(
        self, optimizer: OptimizerConfig, loss: ComparisonLoss, *, updates: int, scoring: ScoringConfig
    ) -> TrainEngine:
        """The engine of a policy that learns from preferences."""
        return self._train(
            "preference", PreferenceModule, self.trained, optimizer, loss, updates=updates, scoring=scoring
        )

    def completion_scorer(self, scoring: ScoringConfig) -> TrainEngine:
        """A frozen model that scores whole completions as a policy that learns from preferences does."""
        return self._train("reference", CompletionScorer, self.source, scoring)

    def reward_model(
        self, optimizer: OptimizerConfig, loss: ComparisonLoss, *, updates: int, scoring: ScoringConfig
    ) -> TrainEngine:
        """The engine of a model that learns rewards; the source is one of values."""
        return self._train(
            "reward_model", RewardModule, self.trained, optimizer, loss, updates=updates, scoring=scoring
        )

    def teacher(self, source: ModelSource, scoring: ScoringConfig) -> TrainEngine:
        """A frozen model of its own, of the same vocabulary."""
        return self._train("teacher", TokenScorer, source, scoring)

    def critic(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        objective: rl_fn.Objective,
        *,
        updates: int,
        scoring: ScoringConfig,
    ) -> TrainEngine:
        """The engine of the values."""
        return self._train("critic", ValueModule, source, optimizer, objective, updates=updates, scoring=scoring)

    def rollout(self, tokenizer: PreTrainedTokenizerBase, options: RolloutOptions | None = None) -> InferenceEngine:
        """The engine of the rollouts: a copy of the model in every slot, or in the rollout's own.

        Comes before the engines that are to keep away from these slots.
        """
        options = RolloutOptions() if options is None else options
        factory = options.factory(self.source, tokenizer, sleep=self._turns is not None)
        engine = InferenceEngine(factory, executor=self.executor, name=f"{self._run}/rollout")
        self._engines.append(engine.build(mesh=Mesh(replicate=self.rollout_workers or len(self.executor.slots))))
        with self._released_by_errors(engine):
            if all(slot.device.startswith("cuda") for slot in self.executor.slots):
                engine.cuda()
            return self._taking_turns(engine)

    def _train(self, name: str, module: type[Scorer], *args: object, **options: object) -> TrainEngine:
        factory = partial(module, *args, **options, parallel=self.parallel)  # type: ignore[arg-type]
        engine = TrainEngine(factory, executor=self.executor, name=f"{self._run}/{name}")
        alone = [other for other in self._engines if self.rollout_workers and isinstance(other, InferenceEngine)]
        self._engines.append(engine.build(mesh=self.mesh, not_colocate_with=[*alone, *self.apart]))
        with self._released_by_errors(engine):
            notes = engine.call("notes")
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                self.tell(note)
        return self._taking_turns(engine)

    @contextmanager
    def _released_by_errors(self, engine: Engine) -> Iterator[None]:
        """Release an engine that nobody else has yet."""
        try:
            yield
        except BaseException:
            self._engines.remove(engine)
            engine.release()
            raise

    def _taking_turns(self, engine: AnEngine) -> AnEngine:
        if self._turns is not None:
            self._turns.add(engine)
        return engine
