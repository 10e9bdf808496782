"""One step of a training, phase by phase, on the engines that a run has: for real, or as a rehearsal."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rl_bridge.algorithms.comparison_training import accumulate, kl_of
from rl_bridge.common.terminal import given
from rl_bridge.data.comparisons import PairBatch, collate_comparisons
from rl_bridge.data.token_batch import TokenBatch, collate, micro_batches
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.worker import worker_of
from rl_bridge.models.model_source import ModelSource, ValueSource
from rl_bridge.parallel.heads import token_values
from rl_bridge.rewards.scoring_models import MICRO_BATCH_TOKENS
from rl_bridge.rewards.sources import reward_models
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_bridge.weights import receiver, transports
from rl_tools.plan.rehearsal import Rehearsal, beside, executor_of, snapshot_tensors, without_numbers
from rl_tools.plan.vllm_memory import PlannedOptions, PlannedRollout
from rl_tools.plan.workload import Largest, Workload, mesh_of
from rl_tools.profile.live_bytes import REWARD, LiveBytes, Peak
from rl_train.policy_options import PolicyPipeline
from rl_train.preference import PreferencePipeline
from rl_train.reward_model import RewardModelPipeline
from rl_train.sft import SFTPipeline

# Reward models of a policy's run. They score in the driver's process, which is the first worker's or beside it.


class PlannedRewards:
    """The weights of these reward models, and a pass over the completions of a step."""

    def __init__(self, names: Sequence[str], live: LiveBytes) -> None:
        """``names``: folders or hub ids, of which a rehearsal reads config.json alone."""
        self._rehearsed = isinstance(live, Rehearsal)
        self._models = []
        for name in names:
            source = beside(name, rehearsed=self._rehearsed, values=True)
            with torch.device("meta"):
                model = source.empty()
            source.load(model, torch.device("cpu"))
            live.watch(model, REWARD)
            self._models.append(model)

    def score(self, workload: Workload) -> None:
        """Score as ``RewardModel`` does; a conversation in the model's own template may be longer than a row."""
        for model in self._models:
            parts = list(micro_batches(workload.batch(model.config.get_text_config().vocab_size), MICRO_BATCH_TOKENS))
            with torch.no_grad():
                for part in Largest(parts) if self._rehearsed else parts:
                    token_values(model, part.batch.tokens)


# A policy's step.

PHASES = ("generation", "scoring", "update", "sync", "checkpoint")
REWARDS = "rewards"
"""After generation, where reward models score the completions."""
EOS = -1
"""No token: a row ends with its limit alone."""


class _Tokens:
    """The attributes of a tokenizer that engines read."""

    eos_token_id = pad_token_id = 0
    chat_template = None


class PolicyStep:
    """The engines of a run and the phases of its step. Made and run within ``LiveBytes``, which it shows its models."""

    def __init__(self, pipeline: PolicyPipeline, source: ModelSource, workload: Workload, live: LiveBytes) -> None:
        """Make the engines as the pipeline does; nothing is computed yet."""
        self.pipeline, self.workload, self.live = pipeline, workload, live
        self.rehearsed = isinstance(live, Rehearsal)
        mesh = mesh_of(pipeline)
        self.executor = executor_of(mesh.size)
        bare = without_numbers if self.rehearsed else (lambda x: x)
        engines = pipeline.engines(self.executor, mesh, bare(source), "plan")
        engines.trained = bare(pipeline.trained(source))
        objective, scoring = pipeline.objective_and_control()[0], pipeline.scoring()
        plain = pipeline.rollout.backend == "in_process"
        rollout_options: Any = pipeline.rollout if plain else PlannedOptions(pipeline.rollout, workload, live)
        self.rollout = engines.rollout(_Tokens(), rollout_options)  # type: ignore[arg-type]
        self.engine: PlannedRollout | None = None if plain else self.worker(self.rollout)
        self.policy = engines.policy(
            pipeline.optimizer, objective, updates=10, scoring=scoring, fused_loss=pipeline.fused_loss
        )
        self.reads_reference = "ref_logprobs" in objective.required_rollout_fields
        reads = self.reads_reference or "ref_logprobs" in objective.required_batch_fields
        self.reference = engines.reference(scoring) if reads or pipeline.track_kl else None
        self.critic = None
        if objective.value is not None:
            critic_model, rehearsed = pipeline.critic.model, self.rehearsed
            critic = (
                bare(ValueSource(source))
                if critic_model is None
                else beside(critic_model, rehearsed=rehearsed, values=True)
            )
            options = pipeline.critic.optimizer, objective
            self.critic = engines.critic(critic, *options, updates=10, scoring=scoring)
        self.teacher = None
        self.reads_teacher = "teacher_logprobs" in objective.required_rollout_fields
        if pipeline.teacher is not None:
            self.teacher = engines.teacher(beside(pipeline.teacher, rehearsed=self.rehearsed), scoring)
        named = reward_models(pipeline.reward)
        self.rewards = PlannedRewards(named, live) if named else None
        self._engines = engines
        self._snapshots: list[torch.Tensor] = []
        for engine in (self.policy, self.reference, self.critic, self.teacher):
            if engine is not None:
                module = self.module(engine)
                live.watch(module)
                if self.rehearsed:
                    _shorten(module)
        if self.engine is None:
            live.watch(self.worker(self.rollout)._model)
        self.vocabulary = int(self.module(self.policy).model.config.get_text_config().vocab_size)

    def module(self, engine: TrainEngine) -> Any:
        """The module of an engine's worker here."""
        return self.worker(engine)

    def worker(self, engine: Any) -> Any:
        """The object that the engine's factory made."""
        return worker_of(self.executor._host, engine.name).module

    def run(self, phases: Sequence[str] = PHASES, times: int = 1) -> dict[str, Peak]:
        """The phases in a run's order, with the optimiser's state and a checkpoint's buffers there; their peaks."""
        peaks: dict[str, Peak] = {}
        self.prepare()
        for _ in range(times):
            for name in phases:
                for part, work in self._parts(name):
                    if self.engine is not None:
                        self.engine.awake(part in ("generation", "sync"))
                    gc.collect()  # as a run's loop does between phases: the update's graph has cycles
                    with self.live.phase(peaks if part in (*phases, REWARDS) else {}, part):
                        work()
        return peaks

    def _parts(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The calls of a phase, each with the phase that a run's memory.jsonl names it by; it knows no ``REWARDS``."""
        if name == "update":
            yield from self.update()
            return
        yield name, getattr(self, name)
        if name == "generation" and self.rewards is not None:
            yield REWARDS, partial(self.rewards.score, self.workload)

    def prepare(self) -> None:
        """Make what the first step of a run leaves behind: the optimisers' state, and a checkpoint's buffers."""
        for engine in (self.policy, self.critic):
            if engine is not None:
                module = self.module(engine)
                for parameter in module.trained_parameters():
                    parameter.grad = torch.zeros_like(parameter)
                module.optimizer.step()
                module.optimizer.zero_grad(set_to_none=True)
        self.checkpoint()

    def generation(self) -> None:
        """Completions of the longest kind; a rehearsal leaves out the steps between two sizes of the cache.

        An engine of vLLM has reserved all that is known of it.
        """
        if self.engine is not None:
            return
        worker, load = self.worker(self.rollout), self.workload
        assert isinstance(worker, InProcessRollout)
        sampling = replace(self.pipeline.policy.sampling, max_new_tokens=load.new_tokens)
        decoder = CachedDecoder(worker._model, sampling, stop=[EOS], max_rows=worker._max_batch_rows)
        prompts = self.prompt_tokens()
        for row in range(-(-load.prompts // len(self.executor.slots)) * load.responses):
            decoder.add(row, prompts[row], seed=row, limit=load.new_tokens)
        while decoder.running or decoder.waiting:
            decoder.step()
            if self.rehearsed and decoder.running:
                _leap(decoder)

    def prompt_tokens(self) -> list[list[int]]:
        """The prompt's tokens of every row."""
        return self.batch().tokens[:, : self.workload.prompt_tokens].tolist()

    def batch(self) -> TokenBatch:
        """A new batch of the workload."""
        return self.workload.batch(self.vocabulary)

    def scoring(self) -> None:
        """Score all that is scored before all updates of the step."""
        batch = NeedParallel(self.batch())
        if self.reference is not None and self.reads_reference:
            self.reference.token_logprobs(batch)
        if self.teacher is not None and self.reads_teacher:
            self.teacher.token_logprobs(batch)
        if self.critic is not None:
            self.critic.values(batch)

    def update(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The updates of a step, of the critic and of the policy; what is scored for each comes right before it."""
        batch, config = self.batch(), self.pipeline.policy
        count = config.updates_per_step
        shares = [batch.rows(index) for index in torch.arange(self.workload.rows).tensor_split(count)]
        shares = shares[: 2 if self.rehearsed else count]
        del batch
        if self.critic is not None:
            yield "update", partial(self._update_critic, shares)
        if config.recompute_old_logprobs:
            for share in shares:
                yield "scoring", partial(self.policy.token_logprobs, NeedParallel(share))
        for share in shares:
            if self.reference is not None:
                yield "scoring", partial(self.reference.token_logprobs, NeedParallel(share))
                share = share._replace(ref_logprobs=torch.zeros(share.mask.shape))
            yield "update", partial(self._update_policy, share)

    def _update_critic(self, shares: Sequence[TokenBatch]) -> None:
        assert self.critic is not None
        for share in shares:
            batch = share._replace(old_values=torch.zeros(share.mask.shape), returns=share.advantages)
            self.critic.train_step(NeedParallel(batch), float(share.mask.sum()))
            self.critic.optimizer_step()

    def _update_policy(self, share: TokenBatch) -> None:
        self.policy.train_step(NeedParallel(share), float(share.mask.sum()), {})
        self.policy.optimizer_step()

    def sync(self) -> None:
        """The weights to the rollout; an engine of vLLM has them proved."""
        with _without_checksums() if self.rehearsed else nullcontext():
            self.policy.sync_weights(self.rollout)
        if self.engine is not None:
            self.policy.token_logprobs(NeedParallel(self.engine.probe(self.pipeline.policy.sampling.temperature)))
            self.engine.proved()

    def checkpoint(self) -> None:
        """The copies that a checkpoint is written from, kept from one to the next."""
        from rl_tools.plan.rehearsal import snapshot_tensors

        if self._snapshots:
            return
        reference = self.reference if self.pipeline.reference_follows else None
        for engine in (self.policy, reference, self.critic):
            if engine is not None:
                self._snapshots += snapshot_tensors(self.live, self.module(engine))

    def close(self) -> None:
        """Let go of the engines."""
        self._snapshots.clear()
        self._engines.__exit__()
        self.live.forget()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Weights travel with the checksum 0 on both sides: a rehearsal's arrays have no bits to sum."""
    sides: tuple[Any, ...] = (receiver, transports)
    before = [side.checksum for side in sides]
    for side in sides:
        side.checksum = _no_checksum
    try:
        yield
    finally:
        for side, checksum in zip(sides, before, strict=True):
            side.checksum = checksum


def _no_checksum(tensor: torch.Tensor) -> int:
    return 0


def _shorten(module: Any) -> None:
    whole = module.micro_batches
    module.micro_batches = lambda batch: Largest(whole(batch))


def _leap(decoder: CachedDecoder) -> None:
    """Go on to the step before the cache grows, or before the rows end; a class of the user's own has no cache."""
    rows = decoder._rows
    longest = max(len(row.prompt) + row.limit for row in rows)
    present = max(len(row.prompt) + len(row.tokens) for row in rows)
    model: Any = decoder._model
    total = min(max(present, model._cache.capacity), longest - 1) if hasattr(model, "_cache") else longest - 1
    for row in rows:
        row.tokens.extend([1] * (total - len(row.prompt) - len(row.tokens)))
        row.logprobs.extend([0.0] * (len(row.tokens) - len(row.logprobs)))
    decoder._state[2] = total - 1


# A step of supervised fine-tuning, of a reward model or of learning from preferences.

Supervision = SFTPipeline | RewardModelPipeline | PreferencePipeline
"""The pipelines without a rollout."""
SUPERVISION_PHASES = ("scoring", "update", "checkpoint")
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

        groups = []
        for _ in range(rows):
            prompt = drawn(self.prompt_tokens)
            groups.append([single_turn(prompt, drawn(self.new_tokens)) for _ in range(self.completions)])
        return groups


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

    def run(self, phases: Sequence[str] = SUPERVISION_PHASES) -> dict[str, Peak]:
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
            examples = load.trajectories(rows, self.vocabulary, seed=seed)
            if self.loss is None:
                return collate([one for (one,) in examples], 0)
            desirable = [row % 2 == 0 for row in range(rows)]
            batch = collate_comparisons(examples, 0, desirable=desirable)
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
                kl_of(self.model, self.loss, held_out)
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
            numbers = dict.fromkeys(self.loss.statistics, 0.1)
            accumulate(self.model, self.loss, batch, numbers)
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
