"""Language models of a loop: the policy and its reference, each over one engine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import rl_fn
from rl_bridge.algorithms.comparison_training import BatchStatistics, comparison_update
from rl_bridge.algorithms.policy_setup import (
    PolicyEngines,
    Replaced,
    require_group,
    require_micro_batches,
    require_parts,
)
from rl_bridge.algorithms.policy_training import policy_update, shares_of
from rl_bridge.algorithms.supervised_training import supervised_batch, supervised_update
from rl_bridge.common.terminal import tell
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine
from rl_bridge.engines.engine import Engine
from rl_bridge.engines.train import wants_proof
from rl_bridge.executors.session import current_executor
from rl_bridge.functional import from_jax
from rl_bridge.loop.data import NLL, Model, change, draw
from rl_bridge.loop.groups import GroupBatch, Groups
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.exported_files import ExportDtype, export_types
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.modules.comparison import ComparisonLoss
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines, MeshOptions
from rl_bridge.pipelines.training import LoRAOptions, trained_part
from rl_bridge.run.run import Stateful

MOMENTUM = 0.9
"""Momentum of BCO's shift, as the command has it."""
_REMEMBERED = 64
"""Versions of a policy's weights, and so updates, that a batch may be drawn before."""
AnyBatch = TypeVar("AnyBatch", GroupBatch, PairBatch)


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """AdamW with a linear warm-up; with ``total`` the rate decays to ``final`` of it by the last update.

    >>> AdamW(1e-6).decay
    'constant'
    >>> AdamW(1e-6, warmup=10, total=200).decay
    'linear'
    """

    learning_rate: float = field(kw_only=False)
    """The highest rate, right after the warm-up."""
    total: int | None = None
    """Updates that the schedule is made for. None: the rate stays after the warm-up."""

    def __post_init__(self) -> None:
        """Refuse what cannot train; without a total there is no decay."""
        super().__post_init__()
        if self.total is None:
            object.__setattr__(self, "decay", "constant")
        elif self.total < 1:
            raise ValueError(f"total counts updates and is at least 1, or None, got {self.total}")

    @property
    def updates(self) -> int:
        """The length of the schedule."""
        return 0 if self.total is None else self.total


class Metrics(dict[str, float]):
    """Numbers of an update with the batch that it was made on: ``run.log`` takes both."""

    def __init__(self, metrics: Mapping[str, float], batch: TokenBatch | PairBatch) -> None:
        super().__init__(metrics)
        self.batch = batch

    @property
    def tokens(self) -> int:
        """How many went through the trainer."""
        return sum(self.batch.row_tokens())


class Placed(Protocol):
    """An object with an engine in some of the workers: a ``Rollout``, a ``Policy``."""

    @property
    def engine(self) -> Engine: ...


class Scored:
    """A model in the workers that ``mesh`` arranges, by default all there are with the model cut over them.

    ``apart_from``: objects in whose workers this model has no part, so that both can work at the same time.
    """

    kind: str
    """The name in checkpoints and in the record."""

    def __init__(
        self, model: Model, mesh: Mesh | None, parallel: ParallelConfig | None, apart_from: Sequence[Placed] = ()
    ) -> None:
        executor = current_executor()
        foreign_slots = {slot for other in apart_from for slot in other.engine.slots}
        mesh = MeshOptions().of(len(executor.slots) - len(foreign_slots)) if mesh is None else mesh
        self.model = model
        self.engines = Engines(executor, mesh, model.source, parallel or ParallelConfig(), run="loop")
        self.engines.apart = [other.engine for other in apart_from]
        self.engine: TrainEngine

    def parts(self) -> dict[str, Engine | Stateful]:
        """The engine, with weights and optimiser."""
        return {self.kind: self.engine}

    def settings(self) -> dict[str, Any]:
        """How the model scores."""
        return {"scoring": asdict(self.engine.scoring_config())}

    def fingerprints(self) -> dict[str, str]:
        """Hash of the model's files."""
        return {f"{self.kind}'s {name}": mark for name, mark in self.model.fingerprints().items()}

    def save(self, folder: str | Path, dtype: ExportDtype = "input") -> None:
        """Write model and tokenizer in Hugging Face format; the folder appears when it is whole.

        "input" writes each weight in the dtype of the folder that the model came from.
        """
        save_pretrained(Path(folder), self.engine, self.model.tokenizer, export_types(self.engines.source, dtype))

    def release(self) -> None:
        """Give the model's memory back."""
        self.engine.release()


class Policy(Scored):
    """A model that an objective trains: of groups with rewards, of rows to imitate (``NLL``), or of comparisons.

    ``mesh`` arranges the workers; ``scoring`` says how a token's probability is computed, among others at which
    temperature completions are sampled and how many tokens one forward pass has. ``apart_from=[rollout]`` leaves the
    rollout its own workers, so that both can work at the same time. ``lora`` trains adapters, drawn from ``seed``, in
    place of the whole model; ``freeze`` are patterns of the names of parameters that are not trained.

    >>> model, rows = load_model("org/Small-1B"), load_rows("problems.jsonl")  # doctest: +SKIP
    >>> objective = rl_fn.recipes.grpo()  # doctest: +SKIP
    >>> policy, rollout = Policy(model, objective, AdamW(1e-6)), Rollout(model)  # doctest: +SKIP
    >>> policy.sync_weights(rollout)  # doctest: +SKIP
    >>> groups = rollout.generate(rows.take(8), SamplingParams(n=4, max_new_tokens=64))  # doctest: +SKIP
    >>> batch = groups.score(reward).batch().with_advantages(objective)  # doctest: +SKIP
    >>> policy.update(batch)["policy_loss"]  # doctest: +SKIP

    Raises:
        ValueError: an objective that cannot be trained in micro-batches, or over this mesh.
    """

    def __init__(
        self,
        model: Model,
        objective: rl_fn.Objective | ComparisonLoss | NLL,
        optimizer: AdamW,
        *,
        mesh: Mesh | None = None,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        fused_loss: bool = False,
        apart_from: Sequence[Placed] = (),
        lora: LoRAOptions | None = None,
        freeze: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(model, mesh, parallel, apart_from)
        self.lora, self.freeze = lora or LoRAOptions(), tuple(freeze)
        self.engines.trained = trained_part(model.source, self.lora, self.freeze, seed)
        self.engines.rehearse_export(model.tokenizer, "input")
        self.objective, self.optimizer = objective, optimizer
        options: dict[str, Any] = {"updates": optimizer.updates, "scoring": scoring or ScoringConfig()}
        self._statistics: BatchStatistics | None = None
        self._replaced: Replaced | None = None
        self._updates = 0
        self._versions: list[tuple[int, int]] = []
        self._seeds: dict[int, int] = {}
        if not isinstance(objective, rl_fn.Objective):
            require_no_temperature(options["scoring"], objective)
        if isinstance(objective, NLL):
            self.kind = "sft"
            self.engine = self.engines.supervised(optimizer, **options)
        elif isinstance(objective, ComparisonLoss):
            self.kind = "preference"
            self._statistics = BatchStatistics(objective, MOMENTUM)
            self.engine = self.engines.preference(optimizer, objective, **options)
        else:
            self.kind = "policy"
            require_micro_batches(objective)
            require_parts(objective, self.engines.mesh)
            self._denominator = from_jax(objective.denominator)
            self.engine = self.engines.policy(optimizer, objective, fused_loss=fused_loss, **options)
            self.remember()

    def score(self, batch: GroupBatch) -> GroupBatch:
        """The batch with π_old of the trainer's present weights, for a rollout that is stale or less precise."""
        scored = batch.with_fields(old_logprobs=self.engine.token_logprobs(NeedParallel(batch.tokens)))
        return replace(scored, rescored=True)

    def update(
        self,
        batch: GroupBatch | TokenBatch | PairBatch | Sequence[Mapping[str, Any]],
        *,
        updates: int = 1,
        stale: bool = False,
    ) -> Metrics:
        """Forward and backward in micro-batches, and the optimiser's step; the metrics of the last one.

        A ``GroupBatch`` with advantages may be cut into several ``updates``, each with the denominator of its own rows,
        the ones without a gradient counted. A ``TokenBatch`` is imitated, a ``PairBatch`` compared. Rows with
        ``prompt`` and ``answer``, which ``rows.take`` gives, are imitated, too: a warm start.

        Completions are of the weights that the policy had when they were drawn, unless ``stale`` says that older ones
        are meant. With ``updates`` above 1, ``AdamW(total=…)`` counts each of them.

        Raises:
            TypeError: a batch of another kind than the objective learns from.
            ValueError: a batch without advantages, or with those of another objective; or sampled from another
                distribution than this policy scores, from older weights, or by an earlier step's seed.
        """
        change(self)
        if isinstance(self.objective, NLL):
            if isinstance(batch, list):
                batch = supervised_batch(batch, partial(encode_row, self.model.tokenizer), self.model.pad_token)
            if not isinstance(batch, TokenBatch):
                raise TypeError(f"NLL imitates rows or a TokenBatch, and not a {type(batch).__name__}")
            return Metrics(supervised_update(self.engine, batch), batch)
        if isinstance(self.objective, ComparisonLoss) and isinstance(batch, PairBatch):
            assert self._statistics is not None
            return Metrics(comparison_update(self.engine, self.objective, batch, self._statistics), batch)
        if not (isinstance(self.objective, rl_fn.Objective) and isinstance(batch, GroupBatch)):
            raise TypeError(f"{self.objective} does not learn from a {type(batch).__name__}")
        require_group(self.objective, batch.groups.sampling.n, "n")
        computed, counted = selected(batch, self.objective)
        self._require_same_scoring(batch)
        self._require_own_draw(batch.groups, stale)
        # The critic's alone: a policy's loss reads none of them.
        tokens = batch.tokens._replace(old_values=None, returns=None, teacher_logprobs=None)
        metrics = dict(batch.metrics) | self._of_syncs()
        for minibatch, denominator, _, count in shares_of(tokens, computed, counted, self._denominator, updates):
            metrics |= policy_update(self.engine, minibatch, denominator, count, {})
        self._updates += 1
        self.remember()
        return Metrics(metrics, batch.tokens)

    def remember(self) -> None:
        """Note the version of the present weights, with which completions are drawn from now on."""
        if isinstance(self.objective, rl_fn.Objective):
            self._versions = [*self._versions[-_REMEMBERED:], (draw(), self.engine.call("weights_version"))]

    def _require_own_draw(self, groups: Groups, stale: bool) -> None:
        """Refuse completions of other weights than the policy had when they were drawn, and a seed that drew before."""
        if groups.drawn is None:
            return
        own = [version for event, version in self._versions if event < groups.drawn]
        versions = {version for t in groups.trajectories for version in t.weights_versions if version >= 0}
        if not stale and own and versions - {own[-1]}:
            raise ValueError(
                f"these completions were drawn by weights of version {max(versions)}, when the policy had "
                f"version {own[-1]}: policy.sync_weights(rollout) comes before rollout.generate; for older ones "
                "on purpose, policy.update(batch, stale=True)"
            )
        if groups.sampling.temperature and self._seeds.setdefault(groups.sampling.seed, groups.drawn) != groups.drawn:
            raise ValueError(
                f"completions of an earlier step were drawn by the seed {groups.sampling.seed}, too: their random "
                "numbers are the same at each place; SamplingParams(seed=step) gives each step its own"
            )

    def sync_weights(self, target: Any, *, share: float = 1.0) -> None:
        """Give a ``Rollout``, a ``Reference`` or another ``Policy`` these weights, each proved by a checksum.

        An engine of vLLM that does not hold them is replaced: that is printed, and ``update`` counts it. A reference
        may be a moving average: θ_ref ← share · θ + (1 − share) · θ_ref.

        Raises:
            ValueError: an ``Ahead`` draws with the rollout, or a share that is not of a reference.
        """
        if getattr(target, "ahead", None) is not None:
            raise ValueError(
                "an Ahead draws with this rollout, while the policy trains: ahead.sync() gives it the weights"
            )
        self.watch(target)
        if isinstance(target, Reference):
            self.engine.follow(target.engine, share)
        elif share != 1:
            raise ValueError(f"a share of the weights is for a Reference, a {type(target).__name__} takes all of them")
        else:
            adapter = self.lora.rank > 0 and isinstance(target, Policy) and target.lora == self.lora
            self.engine.sync_weights(target.engine, adapter=True if adapter else None)
        if isinstance(target, Scored):
            change(target)
        if isinstance(target, Policy):
            target.remember()

    def watch(self, target: Placed) -> None:
        """Count the engines behind ``target`` that syncs from now on have to replace, where its weights are proved."""
        if self._replaced is None and wants_proof(target.engine):
            rollout: Any = target.engine
            self._replaced = Replaced(PolicyEngines(policy=self.engine, rollout=rollout))

    def _of_syncs(self) -> dict[str, float]:
        """Metrics of the syncs since the last update, with a line for the user where an engine was replaced."""
        if self._replaced is None:
            return {}
        metrics = self._replaced.metrics()
        if warning := self._replaced.warning(self._updates):
            tell(warning)
        return metrics

    def parts(self) -> dict[str, Engine | Stateful]:
        """The engine, and the moving statistics of a loss that has them."""
        return super().parts() | ({} if self._statistics is None else {"statistics": self._statistics})

    def settings(self) -> dict[str, Any]:
        """The objective and the optimiser besides."""
        explain = self.objective.explain() if isinstance(self.objective, rl_fn.Objective) else repr(self.objective)
        part = {"lora": asdict(self.lora)} if self.lora.rank else {}
        part |= {"freeze": list(self.freeze)} if self.freeze else {}
        return super().settings() | {"objective": explain, "optimizer": asdict(self.optimizer), **part}

    def _require_same_scoring(self, batch: GroupBatch) -> None:
        scoring, sampled = self.engine.scoring_config(), batch.groups.sampling.temperature
        if scoring.temperature != sampled:
            raise ValueError(
                f"completions are sampled at temperature {sampled}, the policy is scored at {scoring.temperature}: no "
                f"ratio would start at 1. Policy(…, scoring=ScoringConfig(temperature={sampled})) is the same"
            )
        exact = batch.groups.exact and scoring.softcap is None and scoring.dtype == "float32"
        if not (exact or batch.rescored):
            raise ValueError(
                f"the rollout's log-probabilities are not those of the trainer's weights with {scoring}, and no ratio "
                "would start at 1: batch = policy.score(batch) gives π_old of the trainer"
            )
        if batch.reference not in (None, scoring):
            raise ValueError(
                f"the policy is scored with {scoring}, the reference with {batch.reference}: the KL of a model to its "
                "own copy would not be 0"
            )


class Reference(Scored):
    """A frozen model that scores the policy's tokens, or whole completions of comparisons.

    >>> reference = Reference(model)  # doctest: +SKIP
    >>> batch = reference.score(groups.batch())  # doctest: +SKIP
    >>> policy.sync_weights(reference)  # it follows; then it belongs to the run's state  # doctest: +SKIP
    """

    kind = "reference"

    def __init__(
        self,
        model: Model,
        *,
        mesh: Mesh | None = None,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        apart_from: Sequence[Placed] = (),
    ) -> None:
        super().__init__(model, mesh, parallel, apart_from)
        self.engine = self.engines.completion_scorer(scoring or ScoringConfig())

    def score(self, batch: AnyBatch) -> AnyBatch:
        """The batch with log π_ref of each token that counts, or of each completion of comparisons."""
        if isinstance(batch, PairBatch):
            return batch._replace(ref_logprobs=self.engine.completion_logprobs(NeedParallel(batch)))
        scored = batch.with_fields(ref_logprobs=self.engine.token_logprobs(NeedParallel(batch.tokens)))
        return replace(scored, reference=self.engine.scoring_config())


def require_no_temperature(scoring: ScoringConfig, objective: Any) -> None:
    """Refuse a temperature for an objective that samples nothing.

    Raises:
        ValueError: with the way on.
    """
    if scoring.temperature != 1.0:
        raise ValueError(
            f"{objective} learns from the data's own distribution, which has no temperature, got "
            f"{scoring.temperature}: ScoringConfig(temperature=…) is for a policy that samples, and for its reference"
        )


def selected(batch: GroupBatch, objective: rl_fn.Objective) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to compute and tokens that count.

    Raises:
        ValueError: there are no advantages yet, or those of another objective.
    """
    if batch.computed is None or batch.counted is None:
        raise ValueError("this batch has no advantages yet: batch = batch.with_advantages(objective)")
    if batch.objective is not None and batch.objective != objective:
        raise ValueError(
            f"these are advantages of another objective than the one that is trained, {objective.name}: one object is "
            f"for with_advantages(objective) and for the models. The batch's:\n{batch.objective.explain()}"
        )
    return batch.computed, batch.counted
