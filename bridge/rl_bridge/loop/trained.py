"""``Policy``: the model that a loop trains, over one engine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import rl_fn
from rl_bridge.algorithms.advantages import CONTROLLED, require_rescored, require_scored
from rl_bridge.algorithms.comparison_training import BatchStatistics, comparison_update, evaluate_preference
from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.algorithms.policy_setup import (
    Coefficients,
    Controlled,
    PolicyConfig,
    PolicyEngines,
    Replaced,
    require_group,
    require_parts,
)
from rl_bridge.algorithms.policy_training import (
    Mismatch,
    Remarks,
    policy_update,
    require_updates,
    shares_of,
    watched_rows,
)
from rl_bridge.algorithms.supervised_training import held_out_nll, supervised_batch, supervised_update
from rl_bridge.common.argument_kinds import check_call, require_default, require_kind
from rl_bridge.common.terminal import tell
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.rows import supervised_row
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import Mesh, NeedParallel
from rl_bridge.engines.engine import Engine, Turns
from rl_bridge.engines.train import wants_proof
from rl_bridge.functional import from_jax
from rl_bridge.loop.changes import change, draw
from rl_bridge.loop.data import NLL, Model, Rows, in_hand
from rl_bridge.loop.groups import GroupBatch, Groups
from rl_bridge.loop.rollout import Rollout
from rl_bridge.loop.scored import (
    AdamW,
    Metrics,
    Placed,
    Reference,
    Scored,
    released_by_errors,
    require_no_temperature,
    token_logprobs,
)
from rl_bridge.memory.garbage_collection import phase_ended
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.exported_files import ExportDtype
from rl_bridge.modules.comparison import REWARD_LOSSES, ComparisonLoss
from rl_bridge.modules.own_loss import own_marks
from rl_bridge.modules.policy import require_micro_batches
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.training import LoRAOptions, trained_part
from rl_bridge.run.run import Stateful

_REMEMBERED = 64
"""Versions of a policy's weights, and so updates, that a batch may be drawn before."""


class Policy(Scored):
    """A model that an objective trains: of groups with rewards, of rows to imitate (``NLL``), or of comparisons.

    ``mesh`` arranges the workers; ``scoring`` says how a token's probability is computed, among others at which
    temperature completions are sampled and how many tokens one forward pass has. ``apart_from=[rollout]`` leaves the
    rollout its own workers, so that both can work at the same time; with ``turns=turns`` of one ``Turns()`` for all
    objects, what does not work waits in host memory. ``lora`` trains adapters, drawn from ``seed``, in
    place of the whole model; ``freeze`` are patterns of the names of parameters that are not trained. ``control`` sets
    coefficients of the objective from step to step, by what an update measured: ``{"kl": rl_fn.linear_kl(…)}``. Steps
    in which the policy makes no update move no coefficient. Where ``score`` has measured it, the first update is told
    whose tokens count as less than ``least_effective_share`` of these, as a sample of the policy. What
    could not be exported, in ``export_dtype``, is refused at once, unless that was ``rehearsed`` before.

    >>> model, rows = load_model("org/Small-1B"), load_rows("problems.jsonl")  # doctest: +SKIP
    >>> objective = rl_fn.recipes.grpo()  # doctest: +SKIP
    >>> policy, rollout = Policy(model, objective, AdamW(1e-6)), Rollout(model)  # doctest: +SKIP
    >>> policy.sync_weights(rollout)  # doctest: +SKIP
    >>> groups = rollout.generate(rows.take(8), SamplingParams(n=4, max_new_tokens=64))  # doctest: +SKIP
    >>> batch = groups.score(reward).batch().with_advantages(objective)  # doctest: +SKIP
    >>> policy.update(batch)["policy_loss"]  # doctest: +SKIP

    Raises:
        ValueError: an objective that cannot be trained in micro-batches, or over this mesh; or a controller of a term
            that the objective does not have, or has with another coefficient.
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
        turns: Turns | None = None,
        lora: LoRAOptions | None = None,
        freeze: Sequence[str] = (),
        seed: int = 0,
        control: Mapping[str, rl_fn.Controller] | None = None,
        least_effective_share: float = PolicyConfig.least_effective_share,
        export_dtype: ExportDtype = "input",
        rehearsed: bool = False,
    ) -> None:
        super().__init__(model, mesh, parallel, apart_from=apart_from, turns=turns)
        learnt = "an objective: rl_fn.recipes.grpo(), preference_loss(…), NLL()"
        require_kind("objective", objective, (rl_fn.Objective, ComparisonLoss, NLL), learnt)
        require_kind("optimizer", optimizer, AdamW, "AdamW(…)")
        check_call(Policy.__init__, locals())
        self.lora, self.freeze = lora or LoRAOptions(), tuple(freeze)
        self.engines.trained = trained_part(model.source, self.lora, self.freeze, seed)
        self.engines.rehearse_export(model.tokenizer, export_dtype, rehearsed=rehearsed)
        self.objective, self.optimizer = objective, optimizer
        options: dict[str, Any] = {"updates": optimizer.updates, "scoring": scoring or ScoringConfig()}
        self._statistics: BatchStatistics | None = None
        self._replaced: Replaced | None = None
        self._updates = 0
        self._versions: list[tuple[int, int, object]] = []
        self.weights_of: object = model
        """The object whose weights these are: the model at first, then what trained them last."""
        self._seeds: dict[int, int] = {}
        self.control, self._coefficients = dict(control or {}), Coefficients()
        self._completions: tuple[CompletionLog, int] | None = None
        if not isinstance(objective, rl_fn.Objective):
            require_no_temperature(options["scoring"], objective)
            if control:
                raise ValueError(f"{objective} has no coefficient that a controller sets, got {sorted(control)}")
            of_groups = {"fused_loss": fused_loss, "least_effective_share": least_effective_share}
            require_default(of_groups, (False, PolicyConfig.least_effective_share), f"with {objective}")
        if isinstance(objective, NLL):
            self.kind = "sft"
            self.engine = self.engines.supervised(optimizer, **options)
        elif isinstance(objective, ComparisonLoss):
            if objective.name in REWARD_LOSSES:
                raise ValueError(f"{objective.name} is of rewards, and a policy has none: RewardModel(model, loss, …)")
            self.kind = "preference"
            self._statistics = BatchStatistics(objective)
            self.engine = self.engines.preference(optimizer, objective, **options)
        else:
            self.kind = "policy"
            require_micro_batches(objective)
            require_parts(objective, self.engines.mesh)
            self._coefficients = controlled_terms(objective, self.control)
            self._denominator = from_jax(objective.denominator)
            self._mismatch = Mismatch(objective, least_share=least_effective_share)
            self._remarks = Remarks()
            self.engine = self.engines.policy(optimizer, objective, fused_loss=fused_loss, **options)
            with released_by_errors(self):
                self.remember()

    def score(self, batch: GroupBatch, *, updates: int = 1) -> GroupBatch:
        """The batch with π_old of the trainer's present weights, for a rollout that is stale or less precise.

        A batch that has its advantages is scored where the loss reads it, as ``Reference.score`` does.

        Raises:
            ValueError: the batch has advantages that were made with the rollout's log-probabilities as π_old.
        """
        self.require_batch(batch)
        if not batch.rescored and batch.objective is not None:
            if "old_logprobs" in batch.objective.required_rollout_fields:
                raise ValueError(
                    f"the advantages of {batch.objective.name} read old_logprobs, and were made with those of the "
                    "rollout: batch = policy.score(groups.batch()) comes first, batch.with_advantages(objective) behind"
                )
            batch = batch.scored_in_loss("old_logprobs")
        old = token_logprobs(self.engine, batch, updates, batch.tokens.old_logprobs)
        return replace(batch.with_fields(old_logprobs=old), rescored=True)

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
        are meant. With ``updates`` above 1, ``AdamW(total=…)`` counts each of them; 0 measures the batch and keeps some
        of its completions, as in first steps that train the critic alone. Rows and comparisons are one update.

        Raises:
            TypeError: a batch of another kind than the objective learns from.
            ValueError: several updates of rows or comparisons, or more than completions; a batch without advantages,
                with those of another objective, or without what the loss reads; or sampled from another distribution
                than this policy scores, from older weights, or by an earlier seed; or rows that were encoded for
                another vocabulary, or compared with a reference that scores otherwise.
        """
        change(self)
        if isinstance(self.objective, NLL | ComparisonLoss):
            require_default({"updates": updates, "stale": stale}, (1, False), f"with {self.objective}")
            self.weights_of = self
        if isinstance(batch, TokenBatch | PairBatch):
            self.require_encoded(batch)
        if isinstance(self.objective, NLL):
            if isinstance(batch, list | tuple | Rows) and not isinstance(batch, TokenBatch | PairBatch):
                rows = in_hand(batch, supervised_row, self.model)
                batch = supervised_batch(rows, partial(encode_row, self.model.tokenizer), self.model.pad_token)
            if not isinstance(batch, TokenBatch):
                raise TypeError(f"NLL imitates rows or a TokenBatch, and not a {type(batch).__name__}")
            return Metrics(supervised_update(self.engine, batch), batch)
        if isinstance(self.objective, ComparisonLoss) and isinstance(batch, PairBatch):
            assert self._statistics is not None
            self._require_same_reference(batch)
            return Metrics(comparison_update(self.engine, self.objective, batch, self._statistics), batch)
        if not (isinstance(self.objective, rl_fn.Objective) and isinstance(batch, GroupBatch)):
            way_on = ": groups.batch() makes a batch, once they are scored" if isinstance(batch, Groups) else ""
            raise TypeError(f"{self.objective.name} does not learn from a {type(batch).__name__}{way_on}")
        self.require_batch(batch)
        require_group(self.objective, batch.groups.sampling.n, "n")
        require_updates(batch.groups.scored, updates)
        computed, counted = selected(batch, self.objective)
        if updates:
            require_scored(self.objective, self.objective.required_batch_fields, batch.tokens._asdict())
            self._require_same_scoring(batch)
            if not batch.rescored:
                require_rescored(self.objective, way_on="batch = policy.score(batch)")
        self._require_own_draw(batch.groups, stale)
        phase_ended()
        # The critic's alone: a policy's loss reads none of them.
        tokens = batch.tokens._replace(old_values=None, returns=None, teacher_logprobs=None)
        (log, step), self._completions = self._completions or (None, self._updates), None
        metrics = dict(batch.metrics) | self._of_syncs(step) | self._coefficients.metrics()
        shares = list(shares_of(tokens, computed, counted, self._denominator, updates)) if updates else []
        if batch.rescored:
            metrics |= self._mismatch.metrics([minibatch for minibatch, *_ in shares])
        watched = None if log is None else log.choose(step, computed)
        terms = self.coefficients
        moved = False
        for minibatch, denominator, places, count in shares:
            marks = () if watched is None else (NeedParallel(watched[places]),)
            measured = policy_update(self.engine, minibatch, denominator, count, terms, *marks)
            metrics |= measured
            moved = moved or not measured.get("skipped")
        if log is not None and watched is not None:
            log.write(step, batch.groups.scored, batch.tokens, watched, watched_rows(self.engine))
        # A policy that does not move cannot follow a coefficient, and a schedule counts what the policy's own counts.
        if moved:
            self._coefficients.update(metrics)
        self._remark(batch.groups, computed, metrics, step)
        self._updates += 1
        self.remember()
        return Metrics(metrics, batch.tokens)

    def held_out(self, batch: TokenBatch | PairBatch) -> dict[str, float]:
        """The loss of rows that are held out under the present weights, and of comparisons the accuracy, with interval.

        >>> held_out = load_rows("held_out.jsonl", model, NLL()).all()  # doctest: +SKIP
        >>> run.log(policy.update(rows.batch(32)), policy.held_out(held_out))  # doctest: +SKIP

        Raises:
            TypeError: a batch of another kind than the objective learns from.
            ValueError: rows that were encoded for another vocabulary, scored by a reference otherwise than here, or of
                which no token counts.
        """
        if isinstance(batch, TokenBatch | PairBatch):
            self.require_encoded(batch)
        if isinstance(self.objective, NLL) and isinstance(batch, TokenBatch):
            return {"held_out_nll": held_out_nll(self.engine, batch)}
        if isinstance(self.objective, ComparisonLoss) and isinstance(batch, PairBatch):
            self._require_same_reference(batch)
            return evaluate_preference(self.engine, self.objective, batch)
        way_on = "; groups have held_out()" if isinstance(self.objective, rl_fn.Objective) else ""
        name = getattr(self.objective, "name", self.objective)
        raise TypeError(f"{name} is not measured on a {type(batch).__name__}{way_on}")

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients that controllers have set for the next update, by term."""
        return self._coefficients.values()

    def log_completions(self, log: CompletionLog, step: int) -> None:
        """Write some completions of the next update, with what the loss had of each token, as those of ``step``."""
        self._completions = log, step

    def _remark(self, groups: Groups, computed: torch.Tensor, metrics: Mapping[str, float], step: int) -> None:
        """Tell the user of a step without an update, of completions that were cut, and of a rollout that is not π."""
        limit = f"max_new_tokens={groups.sampling.max_new_tokens}"
        for line in self._remarks.of_step(groups.scored, computed, groups.metrics()["truncated"], limit):
            tell(f"step {step}: {line}")
        if warning := self._mismatch.warning(metrics):
            tell(warning)

    def remember(self, weights_of: object = None) -> None:
        """Note the present weights, with which completions are drawn from now on; those ``weights_of`` another."""
        if isinstance(self.objective, rl_fn.Objective):
            version = self.engine.call("weights_version")
            if self._versions and version != self._versions[-1][1]:
                self.weights_of = self
            self.weights_of = self.weights_of if weights_of is None else weights_of
            self._versions = [*self._versions[-_REMEMBERED:], (draw(), version, self.weights_of)]

    def _require_own_draw(self, groups: Groups, stale: bool) -> None:
        """Refuse completions of other weights than the policy had when they were drawn, and a seed that drew before."""
        draws, way_on = groups.draws, "policy.sync_weights(rollout) comes before rollout.generate"
        for one, trajectories in draws if not stale else ():
            # One update is of one policy: the one that drew last.
            own = [noted for noted in self._versions if noted[0] < max(last.when for last, _ in draws)]
            versions = {version for t in trajectories for version in t.weights_versions if version >= 0}
            if own and (others := versions - {own[-1][1]}):
                raise ValueError(
                    f"these completions were drawn by weights of version {max(others)}, when the policy had "
                    f"version {own[-1][1]}: {way_on}; for older ones on purpose, policy.update(batch, stale=True)"
                )
            own = [noted for noted in self._versions if noted[0] < one.when]
            if own and one.weights_of is not None and one.weights_of is not own[-1][2]:
                raise ValueError(
                    f"these completions were drawn by the weights of another policy: {way_on}; for those of another on "
                    "purpose, policy.update(batch, stale=True)"
                )
        for (seed, when, _), _ in draws if groups.sampling.temperature else ():
            if self._seeds.setdefault(seed, when) != when:
                raise ValueError(
                    f"completions of an earlier step were drawn by the seed {seed}, too: their random numbers are the "
                    "same at each place; SamplingParams(seed=step) gives each step its own"
                )

    def sync_weights(self, target: Any, *, share: float = 1.0) -> None:
        """Give a ``Rollout``, a ``Reference`` or another ``Policy`` these weights, each proved by a checksum.

        An engine of vLLM that does not hold them is replaced: that is printed, and ``update`` counts it. A reference
        may be a moving average: θ_ref ← share · θ + (1 − share) · θ_ref.

        Raises:
            ValueError: an ``Ahead`` draws with the rollout, a share that is not of a reference, or a target that reads
                other tokens by the same ids.
        """
        if getattr(target, "ahead", None) is not None:
            raise ValueError(
                "an Ahead draws with this rollout, while the policy trains: ahead.sync() gives it the weights"
            )
        if not hasattr(target, "engine"):
            require_kind("target", target, (Rollout, Scored), "a Rollout, a Reference or another Policy")
        if isinstance(target, Rollout | Scored):
            kind = "rollout" if isinstance(target, Rollout) else target.kind
            self.require_vocabulary(target.model.tokenizer, f"the {kind} that is to get its weights")
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
        if isinstance(target, Rollout):
            target.weights_of = self.weights_of
        if isinstance(target, Policy):
            target.weights_of = self.weights_of
            target.remember(self.weights_of)

    def watch(self, target: Placed) -> None:
        """Count the engines behind ``target`` that syncs from now on have to replace, where its weights are proved."""
        if self._replaced is None and wants_proof(target.engine):
            rollout: Any = target.engine
            self._replaced = Replaced(PolicyEngines(policy=self.engine, rollout=rollout))

    def _of_syncs(self, step: int) -> dict[str, float]:
        """Metrics of the syncs since the last update, with a line for the user where an engine was replaced."""
        if self._replaced is None:
            return {}
        metrics = self._replaced.metrics()
        if warning := self._replaced.warning(step):
            tell(warning)
        return metrics

    def parts(self) -> dict[str, Engine | Stateful]:
        """The engine, the moving statistics of a loss that has them, and the coefficients that controllers set."""
        parts: dict[str, Engine | Stateful] = {} if self._statistics is None else {"statistics": self._statistics}
        parts |= {"coefficients": self._coefficients} if self._coefficients else {}
        return super().parts() | parts

    def settings(self) -> dict[str, Any]:
        """The objective and the optimiser besides."""
        explain = self.objective.explain() if isinstance(self.objective, rl_fn.Objective) else repr(self.objective)
        part = {"lora": asdict(self.lora)} if self.lora.rank else {}
        part |= {"freeze": list(self.freeze)} if self.freeze else {}
        part |= {"control": {term: response(own) for term, own in self.control.items()}} if self.control else {}
        return super().settings() | {"objective": explain, "optimizer": asdict(self.optimizer), **part}

    def fingerprints(self) -> dict[str, str]:
        """Marks of the functions that an objective has from the user besides."""
        marks = own_marks(self.objective) if isinstance(self.objective, rl_fn.Objective) else {}
        return super().fingerprints() | {f"{self.kind}'s {part}": mark for part, mark in marks.items()}

    def _require_same_reference(self, batch: PairBatch) -> None:
        scoring = self.engine.scoring_config()
        reads = isinstance(self.objective, ComparisonLoss) and self.objective.needs_reference
        for other in batch.ref_scorings if reads else ():
            if isinstance(other, ScoringConfig) and not scoring.is_same_distribution(other):
                raise ValueError(
                    f"the policy is scored with {scoring}, the reference with {other}: a policy that has not moved "
                    "would differ from its reference. Reference(model, scoring=…) takes the policy's"
                )

    def _require_same_scoring(self, batch: GroupBatch) -> None:
        scoring, sampled = self.engine.scoring_config(), batch.groups.sampling.temperature
        if scoring.temperature != sampled:
            raise ValueError(
                f"completions are sampled at temperature {sampled}, the policy is scored at {scoring.temperature}: no "
                f"ratio would start at 1. Policy(…, scoring=ScoringConfig(temperature={sampled})) is the same"
            )
        if not (batch.groups.exact and scoring.exact) and not batch.rescored:
            raise ValueError(
                f"the rollout's log-probabilities are not those of the trainer's weights with {scoring}, and no ratio "
                "would start at 1: batch = policy.score(batch) gives π_old of the trainer"
            )
        for kind, other in batch.scorings.items():
            if not scoring.is_same_distribution(other):
                raise ValueError(
                    f"the policy is scored with {scoring}, the {kind} with {other}: the KL of a model to its own copy "
                    "would not be 0"
                )
        if "reward_kl" in self.control and "reward_kl" not in batch.coefficients:
            raise ValueError(
                "the controller of reward_kl sets what the advantages are made with: "
                "batch.with_advantages(objective, coefficients=policy.coefficients)"
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


def controlled_terms(objective: rl_fn.Objective, control: Mapping[str, rl_fn.Controller]) -> Coefficients:
    """The coefficients that the controllers set, each of a term of the objective.

    Raises:
        ValueError: the objective has no such term, or another coefficient than the controller begins with.
    """
    terms: dict[str, Controlled] = {}
    for name, controller in control.items():
        require_kind(f"control[{name!r}]", controller, rl_fn.Controller, "a controller, as rl_fn.linear_kl(…)")
        term = getattr(objective, name) if name in CONTROLLED else None
        if term is None:
            raise ValueError(
                f"{objective.name} has no term {name!r} whose coefficient a controller could set. A KL penalty is "
                "objective.replace(kl=rl_fn.components.KL('k3', 0.02)), with control={'kl': …}"
            )
        begins, coef = float(controller.init().coef), float(np.float32(term.coef))
        if begins and coef not in (0.0, begins):
            raise ValueError(
                f"the controller of {name} begins at {begins:g}, and the objective has {coef:g}: give both one number"
            )
        terms[name] = Controlled(controller, name)
    return Coefficients(terms)


def response(controller: rl_fn.Controller) -> list[float]:
    """The coefficients that a controller sets for a few measurements, by which a resumed run notices another one."""
    state = controller.init()
    coefs = [float(state.coef)]
    for measured in (0.0, 0.01, 0.1, 1.0, 10.0):
        state = controller.update(state, measured)
        coefs.append(float(state.coef))
    return coefs
