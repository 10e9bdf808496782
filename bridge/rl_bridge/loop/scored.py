"""Models of a loop over one engine each: what they share, and those that are not trained, a reference and a teacher."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.algorithms.comparison_training import with_reference
from rl_bridge.algorithms.policy_training import minibatches_of
from rl_bridge.common.argument_kinds import check_call, require_kind
from rl_bridge.common.terminal import given
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.examples import Example
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine
from rl_bridge.engines.engine import Engine, Turns
from rl_bridge.executors.session import current_executor
from rl_bridge.loop.changes import note_scorer
from rl_bridge.loop.data import Model, Rows
from rl_bridge.loop.encoded import encoder_of
from rl_bridge.loop.groups import GroupBatch, require_batch
from rl_bridge.models.exported_files import ExportDtype, export_types
from rl_bridge.models.pretrained import require_vocabulary, save_pretrained
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import Decay, OptimizerConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines, MeshOptions
from rl_bridge.run.run import Stateful

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
    decay: Decay | None = None  # type: ignore[assignment]
    """Form of the way from the highest rate to the last. None: linear with a ``total``, constant without one."""
    total: int | None = None
    """Updates that the schedule is made for. None: the rate stays after the warm-up."""

    def __post_init__(self) -> None:
        """Refuse what cannot train, and a decay without a total, which would have no last update."""
        if self.decay is None:
            object.__setattr__(self, "decay", "constant" if self.total is None else "linear")
        super().__post_init__()
        if self.total is None and (self.decay != "constant" or self.final != OptimizerConfig.final):
            raise ValueError(
                f"the rate decays to its last update, AdamW(…, total=updates): got {given(self, 'decay', 'final')} "
                "without a total"
            )
        if self.initial is not None and not self.warmup:
            raise ValueError(f"initial={self.initial} has no effect without a warmup, which would begin there")
        if self.decay == "constant" and self.final != OptimizerConfig.final:
            raise ValueError(f"a constant rate ends where it was: final={self.final} has no effect with decay constant")
        if self.total is not None and self.total < 1:
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

    ``apart_from``: objects in whose workers this model has no part, so that both can work at the same time. ``turns``:
    objects of the same turns share their devices, and what does not work waits in host memory. In a ``with`` statement
    the model's memory is given back at the end of the block.
    """

    kind: str
    """The name in checkpoints and in the record."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None,
        parallel: ParallelConfig | None,
        *,
        apart_from: Sequence[Placed] = (),
        turns: Turns | None = None,
    ) -> None:
        require_kind("model", model, Model, "one of load_model(…)")
        check_call(Scored.__init__, locals())
        for other in apart_from:
            if not hasattr(other, "engine"):
                raise TypeError(f"apart_from is a list of objects with workers, as [rollout], got {other!r} in it")
        executor = current_executor()
        foreign_slots = {slot for other in apart_from for slot in other.engine.slots}
        mesh = MeshOptions().of(len(executor.slots) - len(foreign_slots)) if mesh is None else mesh
        self.model, self.turns = model, turns
        self.engines = Engines(executor, mesh, model.source, parallel or ParallelConfig(), run="loop", turns=turns)
        self.engines.apart = [other.engine for other in apart_from]
        self.engines.tell, self.engines.types = model.remark, export_types(model.source)
        self.engine: TrainEngine
        self._compared = [model.tokenizer]
        """Tokenizers that name tokens by the ids of this model's, its own among them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.engine.slots:
            self.release()

    def require_batch(self, batch: Any) -> None:
        """Refuse what is no batch of groups, and completions whose ids are other tokens here.

        Raises:
            TypeError: with the way on.
            ValueError: a model with another vocabulary drew the completions.
        """
        require_batch(batch)
        if batch.groups.tokenizer is not None:
            self.require_vocabulary(batch.groups.tokenizer, "the rollout that drew these completions")

    def require_encoded(self, batch: TokenBatch | PairBatch) -> None:
        """Refuse rows or comparisons whose ids are other tokens here, where it is known who encoded them.

        Raises:
            ValueError: they were encoded for a model with another vocabulary.
        """
        if (tokenizer := encoder_of(batch)) is not None:
            self.require_vocabulary(tokenizer, "the model that these rows were encoded for")

    def require_vocabulary(self, tokenizer: PreTrainedTokenizerBase, of_other: str) -> None:
        """Refuse a tokenizer by whose ids this model reads other tokens; each is compared once.

        Raises:
            ValueError: with a token that this model does not have, and ``of_other``.
        """
        if not any(tokenizer is other for other in self._compared):
            require_vocabulary(self.model.tokenizer, tokenizer, kind=type(self).__name__, of_other=of_other)
            self._compared.append(tokenizer)

    def parts(self) -> dict[str, Engine | Stateful]:
        """The engine, with weights and optimiser."""
        return {self.kind: self.engine}

    def settings(self) -> dict[str, Any]:
        """How the model scores."""
        return {"scoring": asdict(self.engine.scoring_config())}

    def fingerprints(self) -> dict[str, str]:
        """Hash of the model's files."""
        return {f"{self.kind}'s {name}": mark for name, mark in self.model.fingerprints().items()}

    def _note(self, scoring: ScoringConfig) -> None:
        """Note what a resumed run compares of a model that no checkpoint has; the note keeps no engine."""
        note_scorer(self.kind, partial(_settings_of, self.kind, self.model, scoring))

    def save(self, folder: str | Path, dtype: ExportDtype | None = None) -> None:
        """Write model and tokenizer in Hugging Face format; the folder appears when it is whole.

        ``dtype``: of the numbers, as "bfloat16". None: as the model was made for, by default each weight in the dtype
        of the folder that the model came from.
        """
        types = self.engines.types if dtype is None else export_types(self.engines.source, dtype)
        save_pretrained(Path(folder), self.engine, self.model.tokenizer, types)

    def release(self) -> None:
        """Give the model's memory back."""
        self.engine.release()


def _settings_of(kind: str, model: Model, scoring: ScoringConfig) -> dict[str, Any]:
    """How a model of a kind scores, and marks of its files, which are read once: later they may be gone."""
    if "marks" not in model.settled:
        model.settled["marks"] = model.fingerprints()
    return {"scoring": asdict(scoring), **{f"{kind}'s {name}": mark for name, mark in model.settled["marks"].items()}}


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


def token_logprobs(
    engine: TrainEngine, batch: GroupBatch, updates: int, others: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, L]: log-probabilities of an engine; of rows that the loss does not read ``others``, or 0.

    Rows that an update takes are scored together, and so in the micro-batches of that update: equal weights give equal
    bits.
    """
    if batch.computed is None or batch.counted is None:
        return engine.token_logprobs(NeedParallel(batch.tokens))
    logprobs = torch.zeros(batch.tokens.mask.shape) if others is None else others.clone()
    for index, *_ in minibatches_of(batch.computed, batch.counted, updates):
        logprobs[index] = engine.token_logprobs(NeedParallel(batch.tokens.rows(index)))
    return logprobs


@contextmanager
def released_by_errors(scored: Scored) -> Iterator[None]:
    """Release the engine of an object whose constructor fails: nobody else can."""
    try:
        yield
    except BaseException:
        scored.release()
        raise


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
        turns: Turns | None = None,
    ) -> None:
        super().__init__(model, mesh, parallel, apart_from=apart_from, turns=turns)
        check_call(Reference.__init__, locals())
        self.engine = self.engines.completion_scorer(scoring or ScoringConfig())

    def score(self, batch: AnyBatch, *, updates: int = 1) -> AnyBatch:
        """The batch with log π_ref of each token that counts, or of each completion of comparisons.

        A batch that has its advantages is scored where the loss reads it: ``updates`` are those of ``policy.update``,
        whose shares have then the same rows.

        Raises:
            TypeError: what is no batch.
            ValueError: completions of a model with another vocabulary; or comparisons, and the reference has a
                temperature.
        """
        if isinstance(batch, PairBatch):
            self.require_encoded(batch)
            scoring = self._scoring_of_comparisons()
            self._note(scoring)
            logprobs = self.engine.completion_logprobs(NeedParallel(batch))
            return batch._replace(ref_logprobs=logprobs, ref_scorings=(scoring,))
        self.require_batch(batch)
        scoring = self.engine.scoring_config()
        self._note(scoring)
        scored = batch.with_fields(ref_logprobs=token_logprobs(self.engine, batch, updates))
        return scored.scored_in_loss("ref_logprobs").with_scoring(self.kind, scoring)

    def cache(self, rows: Rows) -> None:
        """Score all comparisons of ``rows`` once: each batch of these has log π_ref, and the reference may go.

        >>> with Reference(model) as reference:  # doctest: +SKIP
        ...     reference.cache(rows)

        Raises:
            TypeError: rows that are no comparisons.
            ValueError: they were encoded for a model with another vocabulary, or the reference has a temperature.
        """
        if not all(isinstance(row, Example) for row in rows.rows):
            raise TypeError(
                "a reference scores comparisons once: load_rows(data, model, preference_loss(…)) reads them"
            )
        self.require_encoded(rows._batch(rows.rows[:1]))
        self._scoring_of_comparisons()
        rows.exchange(with_reference(rows.rows, self.engine, self.model.pad_token), self.fingerprints())

    def _scoring_of_comparisons(self) -> ScoringConfig:
        scoring = self.engine.scoring_config()
        require_no_temperature(scoring, "a loss of comparisons")
        return scoring


class Teacher(Scored):
    """A frozen model that a policy learns from, token by token: on-policy distillation.

    ``student`` is the policy's model, whose vocabulary the teacher has.

    >>> objective = rl_fn.recipes.on_policy_distillation()  # doctest: +SKIP
    >>> teacher = Teacher(load_model("org/Large-70B"), student=model)  # doctest: +SKIP
    >>> batch = teacher.score(groups.batch()).with_advantages(objective)  # doctest: +SKIP

    Raises:
        ValueError: a vocabulary that lacks a token of the student's: the probabilities would be of other tokens.
    """

    kind = "teacher"

    def __init__(
        self,
        model: Model,
        student: Model,
        *,
        mesh: Mesh | None = None,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        apart_from: Sequence[Placed] = (),
        turns: Turns | None = None,
    ) -> None:
        for name, one in (("model", model), ("student", student)):
            require_kind(name, one, Model, "one of load_model(…)")
        check_call(Teacher.__init__, locals())
        require_vocabulary(model.tokenizer, student.tokenizer)
        super().__init__(model, mesh, parallel, apart_from=apart_from, turns=turns)
        self.engine = self.engines.teacher(model.source, scoring or ScoringConfig())

    def score(self, batch: GroupBatch) -> GroupBatch:
        """The batch with the teacher's log-probability of each token that counts."""
        self.require_batch(batch)
        scoring = self.engine.scoring_config()
        self._note(scoring)
        scored = batch.with_fields(teacher_logprobs=self.engine.token_logprobs(NeedParallel(batch.tokens)))
        return scored.with_scoring(self.kind, scoring)
