"""One step of a policy's training, phase by phase, on the engines that a run has: for real, or as a rehearsal."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rl_bridge.data.requests import SamplingParams
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.lifecycle import worker_of
from rl_bridge.memory.first_worker import executor_of
from rl_bridge.memory.live import LiveBytes, Peak
from rl_bridge.memory.meshes import mesh_of
from rl_bridge.memory.rehearsal import Rehearsal
from rl_bridge.memory.reward_models import PlannedRewards
from rl_bridge.memory.sources import beside, without_numbers
from rl_bridge.memory.vllm_rollout import PlannedOptions, PlannedRollout
from rl_bridge.memory.workload import Largest, Workload
from rl_bridge.models.source import ModelSource
from rl_bridge.models.values import ValueSource
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.rewards.sources import reward_models
from rl_bridge.rollout.decoder import Decoder
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_bridge.weights import receiver
from rl_bridge.weights.transports import same_slot

PHASES = ("generation", "scoring", "update", "sync", "checkpoint")
REWARDS = "rewards"
"""After generation, where reward models score the completions."""
EOS = -1
"""No token: a row ends with its limit alone."""


class _Tokens:
    """What engines ask of a tokenizer."""

    eos_token_id = pad_token_id = 0


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
        objective, scoring = pipeline.objective.build(), pipeline.scoring()
        plain = pipeline.rollout.backend == "in_process"
        made: Any = pipeline.rollout if plain else PlannedOptions(pipeline.rollout, workload, live)
        self.rollout = engines.rollout(_Tokens(), made)  # type: ignore[arg-type]
        self.engine: PlannedRollout | None = None if plain else self.worker(self.rollout)
        self.policy = engines.policy(
            pipeline.optimizer, objective, updates=10, scoring=scoring, fused_loss=pipeline.fused_loss
        )
        self.reads_reference = "ref_logprobs" in objective.required_rollout_fields
        reads = self.reads_reference or "ref_logprobs" in objective.required_batch_fields
        self.reference = engines.reference(scoring) if reads or pipeline.track_kl else None
        self.critic = None
        if objective.value is not None:
            own, rehearsed = pipeline.critic.model, self.rehearsed
            critic = bare(ValueSource(source)) if own is None else beside(own, rehearsed=rehearsed, values=True)
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
        """What the engine's factory made."""
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
        """What the first step of a run leaves behind: the optimisers' state, and a checkpoint's buffers."""
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
        sampling = SamplingParams(max_new_tokens=load.new_tokens, **_drawing(self.pipeline))
        decoder = Decoder(worker._model, sampling, stop=[EOS], max_rows=worker._max_batch_rows)
        prompts = self.prompt_tokens()
        for row in range(-(-load.prompts // len(self.executor.slots)) * load.responses):
            decoder.add(row, prompts[row], seed=row, limit=load.new_tokens)
        while decoder.running or decoder.waiting:
            decoder.step()
            if self.rehearsed and decoder.running:
                _leap(decoder)

    def prompt_tokens(self) -> list[list[int]]:
        """Of every row."""
        return self.batch().tokens[:, : self.workload.prompt_tokens].tolist()

    def batch(self) -> TokenBatch:
        """A new batch of the workload."""
        return self.workload.batch(self.vocabulary)

    def scoring(self) -> None:
        """What is scored before all updates of the step."""
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
            read = share._replace(old_values=torch.zeros(share.mask.shape), returns=share.advantages)
            self.critic.train_step(NeedParallel(read), float(share.mask.sum()))
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
        from rl_bridge.memory.snapshots import snapshot_tensors

        if self._snapshots:
            return
        for engine in (self.policy, self.reference, self.critic):
            if engine is not None:
                self._snapshots += snapshot_tensors(self.live, self.module(engine))

    def close(self) -> None:
        """Let go of the engines."""
        self._snapshots.clear()
        self._engines.__exit__()
        self.live.forget()


def _drawing(pipeline: PolicyPipeline) -> dict[str, Any]:
    options = vars(pipeline.policy.sampling)
    return {name: value for name, value in options.items() if name != "max_new_tokens"}


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Weights travel with the checksum 0 on both sides: a rehearsal's arrays have no bits to sum."""
    sides: tuple[Any, ...] = (receiver, same_slot)
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


def _leap(decoder: Decoder) -> None:
    """Go on to the step before the cache grows, or before the rows end."""
    rows = decoder._rows
    longest = max(len(row.prompt) + row.limit for row in rows)
    present = max(len(row.prompt) + len(row.tokens) for row in rows)
    total = min(max(present, decoder._model._cache.capacity), longest - 1)
    for row in rows:
        row.tokens.extend([1] * (total - len(row.prompt) - len(row.tokens)))
        row.logprobs.extend([0.0] * (len(row.tokens) - len(row.logprobs)))
    decoder._state[2] = total - 1
