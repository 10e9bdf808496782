"""One step of supervised fine-tuning, of a reward model or of learning from preferences, phase by phase."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rl_bridge.data.pair_batch import PairBatch, collate_comparisons
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.lifecycle import worker_of
from rl_bridge.memory.first_worker import executor_of
from rl_bridge.memory.live import LiveBytes, Peak
from rl_bridge.memory.meshes import mesh_of
from rl_bridge.memory.rehearsal import Rehearsal
from rl_bridge.memory.snapshots import snapshot_tensors
from rl_bridge.memory.sources import without_numbers
from rl_bridge.messages import given
from rl_bridge.models.source import ModelSource
from rl_bridge.models.values import ValueSource
from rl_bridge.pipelines.preference import PreferencePipeline
from rl_bridge.pipelines.reward_model import RewardModelPipeline
from rl_bridge.pipelines.sft import SFTPipeline
from rl_bridge.trainers.comparison_steps import accumulate, kl_of

Supervision = SFTPipeline | RewardModelPipeline | PreferencePipeline
"""The pipelines without a rollout."""
PHASES = ("scoring", "update", "checkpoint")
"""Scoring: of the held-out rows by the trained model, and of rows by a reference."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """``rows`` of an update and ``held_out`` ones, each of ``completions`` with a prompt of ``prompt_tokens``.

    A row of supervised fine-tuning has one completion.
    """

    rows: int
    held_out: int
    prompt_tokens: int
    new_tokens: int
    completions: int = 1

    def __post_init__(self) -> None:
        """Refuse a step without a token."""
        if min(vars(self).values()) < 1:
            raise ValueError(
                "rows, held_out, prompt_tokens, new_tokens (--completion-tokens) and completions must be ≥ 1, got "
                f"{given(self, *vars(self))}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of what is never cut: a row, or the completions of a comparison with their prompts."""
        return self.completions * (self.prompt_tokens + self.new_tokens)

    def trajectories(self, rows: int, vocabulary: int, *, seed: int) -> list[list[Trajectory]]:
        """The completions of each of so many rows, of random tokens."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(count: int) -> list[int]:
            return torch.randint(1, max(2, vocabulary), (count,), generator=generator).tolist()

        made = []
        for _ in range(rows):
            prompt = drawn(self.prompt_tokens)
            made.append([single_turn(prompt, drawn(self.new_tokens)) for _ in range(self.completions)])
        return made


class SupervisionStep:
    """The engines of a run and the phases of its step. Made and run within ``LiveBytes``, which it shows its models."""

    def __init__(self, pipeline: Supervision, source: ModelSource, workload: Rows, live: LiveBytes) -> None:
        """Make the engines as the pipeline does; nothing is computed yet."""
        self.pipeline, self.workload, self.live = pipeline, workload, live
        self.rehearsed = isinstance(live, Rehearsal)
        mesh = mesh_of(pipeline)
        self.executor = executor_of(mesh.size)
        with torch.device("meta"):
            self.vocabulary = int(source.empty().config.get_text_config().vocab_size)
        bare = without_numbers if self.rehearsed else (lambda x: x)
        whole: Any = ValueSource(source) if isinstance(pipeline, RewardModelPipeline) else source
        self._engines = pipeline.engines(self.executor, mesh, bare(whole), "plan")
        self._engines.trained = bare(pipeline.trained(whole))
        self.loss = None if isinstance(pipeline, SFTPipeline) else pipeline.loss.build()
        self.reference: TrainEngine | None = None
        scoring, options = pipeline.scoring(), {"updates": 10, "scoring": pipeline.scoring()}
        if isinstance(pipeline, SFTPipeline):
            self.model = self._engines.supervised(pipeline.optimizer, **options)
        elif isinstance(pipeline, RewardModelPipeline):
            self.model = self._engines.reward_model(pipeline.optimizer, pipeline.loss.build(), **options)
        else:
            loss = pipeline.loss.build()
            # A cached reference scores alone, before there is a policy, and is gone when training begins.
            if loss.needs_reference and not pipeline.cache_reference:
                self.reference = self._engines.completion_scorer(scoring)
            self.model = self._engines.preference(pipeline.optimizer, loss, **options)
        self._snapshots: list[torch.Tensor] = []
        for engine in (self.model, self.reference):
            if engine is not None:
                live.watch(self.module(engine))

    def module(self, engine: TrainEngine) -> Any:
        """The module of an engine's worker here."""
        return worker_of(self.executor._host, engine.name).module

    def run(self, phases: Sequence[str] = PHASES) -> dict[str, Peak]:
        """The phases, with the optimiser's state and a checkpoint's buffers there; their peaks."""
        peaks: dict[str, Peak] = {}
        module = self.module(self.model)
        for parameter in module.trained_parameters():
            parameter.grad = torch.zeros_like(parameter)
        module.optimizer.step()
        module.optimizer.zero_grad(set_to_none=True)
        self.checkpoint()
        for name in phases:
            with self.live.phase(peaks, name):
                getattr(self, name)()
        return peaks

    def batch(self, rows: int, *, seed: int = 0) -> Any:
        """New rows as the trainer reads them, which a run's driver holds and no worker's memory counts.

        A rehearsal takes as many as fill two micro-batches of each worker: the first brings gradients into being,
        which the second then finds.
        """
        load = self.workload
        if self.rehearsed and self.pipeline.micro_batch_tokens != "auto":
            least = load.completions * load.new_tokens  # where a prompt is computed once
            rows = min(rows, 2 * self.model.mesh.data_parts * (self.pipeline.micro_batch_tokens // least + 1))
        with _disable_current_modes():
            made = load.trajectories(rows, self.vocabulary, seed=seed)
            if self.loss is None:
                return collate([one for (one,) in made], 0)
            desirable = [row % 2 == 0 for row in range(rows)]
            batch = collate_comparisons(made, 0, desirable=desirable)
            needed = {name: torch.ones(rows) for name in batch.numbers}
            reference = torch.zeros(batch.present.shape) if self.loss.needs_reference else None
            return batch._replace(numbers=needed, ref_logprobs=reference)

    def scoring(self) -> None:
        """The held-out rows under the present weights, and rows of a step by the reference."""
        held_out = self.batch(self.workload.held_out, seed=1)
        if self.loss is None:
            self.model.nll(NeedParallel(held_out))
        elif isinstance(self.pipeline, RewardModelPipeline):
            self.model.completion_rewards(NeedParallel(held_out))
        else:
            self.model.completion_logprobs(NeedParallel(self._learned(held_out)))
            if "kl" in self.loss.statistics:
                kl_of(self.model, held_out)
            if self.reference is not None:
                self.reference.completion_logprobs(NeedParallel(self.batch(self.workload.rows)))

    def _learned(self, batch: PairBatch) -> PairBatch:
        assert self.loss is not None
        return batch.side(0) if self.loss.form == "singles" else batch

    def update(self) -> None:
        """The trainer's own gradient and update."""
        batch: Any = self.batch(self.workload.rows)
        if self.loss is None:
            assert isinstance(batch, TokenBatch)
            self.model.train_step(NeedParallel(batch), float(batch.mask.sum()))
        else:
            given = dict.fromkeys(self.loss.statistics, 0.1)
            accumulate(self.model, self.loss, batch, given)
        self.model.optimizer_step()

    def checkpoint(self) -> None:
        """The copies that a checkpoint is written from, kept from one to the next."""
        if not self._snapshots:
            self._snapshots = snapshot_tensors(self.live, self.module(self.model))

    def close(self) -> None:
        """Let go of the engines."""
        self._snapshots.clear()
        self._engines.__exit__()
        self.live.forget()
