"""Models of a loop with a head of one number: a critic and a reward model, each over one engine."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import rl_fn
from rl_bridge.algorithms.comparison_training import BatchStatistics, comparison_update, evaluate_reward_model
from rl_bridge.algorithms.policy_training import critic_update, require_updates, shares_of
from rl_bridge.common.argument_kinds import check_call, require_kind
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.engines import Mesh, NeedParallel
from rl_bridge.engines.engine import Turns
from rl_bridge.functional import from_jax
from rl_bridge.loop.changes import change
from rl_bridge.loop.data import Model
from rl_bridge.loop.groups import GroupBatch
from rl_bridge.loop.scored import AdamW, Metrics, Placed, Scored, require_no_temperature
from rl_bridge.loop.trained import selected
from rl_bridge.models.exported_files import ExportDtype
from rl_bridge.models.model_source import ModelSource, PretrainedValueSource, ValueSource
from rl_bridge.modules.comparison import ComparisonLoss
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.training import LoRAOptions, trained_part


class Critic(Scored):
    """A model of values with the trunk of ``model`` and a head of zeros, trained by an objective's value loss.

    >>> objective = rl_fn.recipes.ppo()  # doctest: +SKIP
    >>> critic = Critic(model, objective, AdamW(3e-4))  # doctest: +SKIP
    >>> batch = critic.score(groups.batch()).with_advantages(objective)  # doctest: +SKIP
    >>> run.log(critic.update(batch), policy.update(batch), groups)  # doctest: +SKIP

    Raises:
        ValueError: the objective has no value loss.
    """

    kind = "critic"

    def __init__(
        self,
        model: Model,
        objective: rl_fn.Objective,
        optimizer: AdamW,
        *,
        mesh: Mesh | None = None,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        apart_from: Sequence[Placed] = (),
        turns: Turns | None = None,
    ) -> None:
        super().__init__(model, mesh, parallel, apart_from=apart_from, turns=turns)
        require_kind("objective", objective, rl_fn.Objective, "one with a critic, as rl_fn.recipes.ppo()")
        require_kind("optimizer", optimizer, AdamW, "AdamW(…)")
        check_call(Critic.__init__, locals())
        if objective.value is None:
            raise ValueError(f"{objective.name} has no critic's loss: objective.replace(value=ValueLoss()) has one")
        self.objective, self.optimizer = objective, optimizer
        self._denominator = from_jax(objective.denominator)
        source: ModelSource = model.source
        if not isinstance(source, PretrainedValueSource):
            source = ValueSource(source, pad_token=model.pad_token)
        options: dict[str, Any] = {"updates": optimizer.updates, "scoring": scoring or ScoringConfig()}
        self.engine = self.engines.critic(source, optimizer, objective, **options)

    def score(self, batch: GroupBatch) -> GroupBatch:
        """The batch with values of the state before each token."""
        self.require_batch(batch)
        return batch.with_fields(old_values=self.engine.values(NeedParallel(batch.tokens)))

    def update(self, batch: GroupBatch, *, updates: int = 1) -> Metrics:
        """The optimiser's step on the returns: a completion teaches the critic whether or not it teaches the policy.

        Raises:
            ValueError: a batch without advantages, or more updates than completions.
        """
        self.require_batch(batch)
        require_updates(batch.groups.scored, updates)
        change(self)
        _, counted = selected(batch, self.objective)
        metrics: dict[str, float] = {}
        for minibatch, denominator, *_ in shares_of(batch.tokens, counted.any(1), counted, self._denominator, updates):
            metrics |= critic_update(self.engine, minibatch, denominator)
        return Metrics(metrics, batch.tokens)

    def settings(self) -> dict[str, Any]:
        """The optimiser besides."""
        return super().settings() | {"optimizer": asdict(self.optimizer)}


class RewardModel(Scored):
    """A model that learns rewards of compared completions: the trunk of ``model`` with a head of zeros.

    The rows come first: they choose the token that the model's tokenizer pads with. ``lora``, ``freeze``, ``seed``,
    ``export_dtype`` and ``rehearsed`` are those of ``Policy``.

    >>> loss = preference_loss("bradley_terry")  # doctest: +SKIP
    >>> rows = load_rows("pairs.jsonl", model, loss)  # doctest: +SKIP
    >>> judge = RewardModel(model, loss, AdamW(1e-5))  # doctest: +SKIP
    >>> judge.update(rows.batch(64))["accuracy"]  # doctest: +SKIP
    >>> judge.save("judge")  # then groups.score("model:judge")  # doctest: +SKIP

    Raises:
        ValueError: a loss that trains a policy.
    """

    kind = "reward_model"

    def __init__(
        self,
        model: Model,
        loss: ComparisonLoss,
        optimizer: AdamW,
        *,
        mesh: Mesh | None = None,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        turns: Turns | None = None,
        lora: LoRAOptions | None = None,
        freeze: Sequence[str] = (),
        seed: int = 0,
        export_dtype: ExportDtype = "input",
        rehearsed: bool = False,
    ) -> None:
        super().__init__(model, mesh, parallel, turns=turns)
        require_kind("loss", loss, ComparisonLoss, 'one of rewards: preference_loss("bradley_terry")')
        require_kind("optimizer", optimizer, AdamW, "AdamW(…)")
        check_call(RewardModel.__init__, locals())
        self.loss, self.optimizer = loss, optimizer
        self.lora, self.freeze = lora or LoRAOptions(), tuple(freeze)
        require_no_temperature(scoring or ScoringConfig(), loss)
        self.engines.source = ValueSource(model.source, pad_token=model.pad_token)
        self.engines.trained = trained_part(self.engines.source, self.lora, self.freeze, seed)
        self.engines.rehearse_export(model.tokenizer, export_dtype, rehearsed=rehearsed)
        self._statistics = BatchStatistics(loss)
        options: dict[str, Any] = {"updates": optimizer.updates, "scoring": scoring or ScoringConfig()}
        self.engine = self.engines.reward_model(optimizer, loss, **options)

    def update(self, batch: PairBatch) -> Metrics:
        """One step of the optimiser on a batch of comparisons.

        Raises:
            TypeError: a batch of anything else.
        """
        require_kind("batch", batch, PairBatch, "comparisons, as load_rows(data, model, loss).batch(64) gives")
        self.require_encoded(batch)
        change(self)
        return Metrics(comparison_update(self.engine, self.loss, batch, self._statistics), batch)

    def held_out(self, batch: PairBatch) -> dict[str, float]:
        """The loss of comparisons that are held out under the present weights, and the accuracy with its interval.

        Raises:
            TypeError: a batch of anything else.
        """
        if not isinstance(batch, PairBatch):
            raise TypeError(f"{self.loss} is not measured on a {type(batch).__name__}")
        self.require_encoded(batch)
        return evaluate_reward_model(self.engine, self.loss, batch)

    def settings(self) -> dict[str, Any]:
        """The loss, the optimiser and the trained part besides."""
        part = {"lora": asdict(self.lora)} if self.lora.rank else {}
        part |= {"freeze": list(self.freeze)} if self.freeze else {}
        return super().settings() | {"loss": repr(self.loss), "optimizer": asdict(self.optimizer), **part}
