"""The modules that learn from comparisons by a loss of ``rl_fn``: preferences of a policy, a reward model."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

import rl_fn
from rl_bridge.data.comparisons import Form, PairBatch, PairPart, pair_parts, restore_rows, stand_in_pair
from rl_bridge.engines.dispatch import returns
from rl_bridge.functional import from_jax
from rl_bridge.memory.token_budget import scores_within_memory, within_memory
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.scoring import Scorer, ScoringConfig, TokenScorer
from rl_bridge.modules.trainable import OptimizerConfig, Trainable
from rl_bridge.modules.value import ValueScorer
from rl_bridge.parallel.config import ParallelConfig
from rl_fn import Ratio, preference_losses

# Losses of comparisons by their names in ``rl_fn``: what each reads, and its value for every comparison of a batch.

WATCHED = ("PreferenceMetrics", "preference_metrics", "kto_kl", "wpo_weights")
"""Names of the family of preference losses that no policy is trained with on its own."""
REWARD_LOSSES = ("bradley_terry", "plackett_luce")
"""They compare rewards, and train a reward model."""
PREFERENCE_LOSSES = tuple(name for name in preference_losses.__all__ if name not in (*WATCHED, *REWARD_LOSSES))
"""They compare log-probabilities, and train a policy."""
PER_TOKEN = ("orpo", "simpo")
"""They read mean log-probabilities per token, others sums."""
OVER_BATCH = ("aot", "aot_unpaired")
"""They sort the batch: the gradient of one comparison depends on all others."""
UNMATCHED = ("aot_unpaired", "bco")
"""Their good and bad completions may belong to different prompts."""
STATISTICS = ("kl", "delta")
"""Numbers of the whole batch, or of the batches before."""
SHIFT_MOMENTUM = 0.9
"""Momentum of the statistic ``delta`` from batch to batch."""

_READS: dict[str, Callable[["_Inputs"], torch.Tensor | None]] = {
    "chosen": lambda x: x.values[:, 0],
    "rejected": lambda x: x.values[:, 1],
    "gold": lambda x: x.values[:, 2],
    "logprobs": lambda x: x.values[:, 0],
    "ref_chosen": lambda x: x.reference[:, 0],
    "ref_rejected": lambda x: x.reference[:, 1],
    "ref_logprobs": lambda x: x.reference[:, 0],
    "chosen_lengths": lambda x: x.counted[:, 0],
    "rejected_lengths": lambda x: x.counted[:, 1],
    "desirable": lambda x: x.batch.desirable,
    "chosen_rewards": lambda x: x.values[:, 0],
    "rejected_rewards": lambda x: x.values[:, 1],
    "rewards": lambda x: x.values,
}
"""Values of the positional arguments of a loss, by name. ``mask`` and the ``STATISTICS`` come besides."""


@dataclass(frozen=True)
class _Inputs:
    batch: PairBatch
    values: torch.Tensor
    reference: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ComparisonLoss:
    """A loss of ``rl_fn`` with its constants, over the completions of a ``PairBatch``.

    >>> loss = ComparisonLoss(name="dpo", constants={"beta": 0.2})
    >>> loss.form, loss.needs_reference, loss.over_batch
    ('pairs', True, False)
    """

    name: str
    constants: Mapping[str, Any]
    average: bool | None = None
    """Whether the loss reads mean log-probabilities per token. None is the loss's own way."""
    wpo: bool = False
    """Weigh each comparison by how likely the policy is to write its completions (WPO's plain weights)."""
    shift_momentum: float = SHIFT_MOMENTUM
    """Momentum of BCO's shift, a moving mean of the rewards."""

    def __post_init__(self) -> None:
        """Refuse a name or a constant that there is not, and an average where the loss divides by lengths itself."""
        if self.name not in (*PREFERENCE_LOSSES, *REWARD_LOSSES):
            names = ", ".join((*PREFERENCE_LOSSES, *REWARD_LOSSES))
            raise ValueError(f"there is no loss of comparisons {self.name!r}; there is: {names}")
        unknown = self.constants.keys() - constants_of(self.name).keys()
        if unknown:
            raise ValueError(f"{self.name} does not take {', '.join(sorted(unknown))}")
        if self.average and any(name.endswith("_lengths") for name in reads(self.name)):
            raise ValueError(f"{self.name} divides by the lengths itself: average must be None or False")
        if self.name in REWARD_LOSSES and (self.average is not None or self.wpo):
            raise ValueError(f"{self.name} reads rewards: average and wpo are of losses of a policy")
        if not 0 <= self.shift_momentum < 1:
            raise ValueError(f"shift_momentum must be in [0, 1), got {self.shift_momentum}")
        if "delta" not in self.statistics and self.shift_momentum != SHIFT_MOMENTUM:
            raise ValueError(f"shift_momentum {self.shift_momentum} has no effect with {self.name}, which has no shift")
        self._require_constants()

    @property
    def form(self) -> Form:
        """How many completions a comparison has, and of what kind."""
        names = reads(self.name)
        if "gold" in names:
            return "triples"
        return "ranking" if "rewards" in names else "singles" if "desirable" in names else "pairs"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a reference."""
        return any(name.startswith("ref_") for name in reads(self.name))

    @property
    def over_batch(self) -> bool:
        """Whether the loss needs all comparisons at once."""
        return self.name in OVER_BATCH

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the numbers that the loss reads of a whole batch."""
        return tuple(name for name in STATISTICS if name in _parameters(self.name))

    @property
    def beta(self) -> float:
        """The factor from a log-ratio to an implicit reward; 1 where the loss has no β."""
        return float(self.constants.get("beta", constants_of(self.name).get("beta", 1.0)))

    def __call__(
        self, batch: PairBatch, outputs: torch.Tensor, statistics: Mapping[str, float] | None = None
    ) -> torch.Tensor:
        """The loss of each comparison, [N], zero where something is not present.

        ``outputs`` is [N, K]: sums of log-probabilities, or rewards. ``statistics`` has the loss's ``statistics``.
        """
        inputs = self._inputs(batch, outputs)
        values = {name: _READS[name](inputs) for name in reads(self.name)}
        # Tensors, or every new value would be a new program.
        numbers = {} if statistics is None else dict(statistics)
        values |= {name: torch.tensor(numbers[name], device=outputs.device) for name in self.statistics}
        constants = {**self.constants}
        # A column of the data takes the place of the constant of its name.
        constants |= {name: value for name, value in batch.numbers.items() if name in constants_of(self.name)}
        ranking = self.form == "ranking"
        mask = batch.present if ranking else batch.present.all(1)
        losses = _function(self.name)(**values, mask=mask, **constants)
        return losses * self._weights(batch, outputs) if self.wpo else losses

    def kl(self, batch: PairBatch, outputs: torch.Tensor) -> float:
        """The statistic ``kl``: KTO's KL to the reference, of completions [N, 1] that belong to other prompts.

        ``outputs`` is [N, 1], as at a call, and is averaged over tokens where that of a call is: the loss subtracts the
        KL from log-ratios, and both have one unit.
        """
        inputs = self._inputs(batch, outputs)
        return float(_function("kto_kl")(inputs.values[:, 0], inputs.reference[:, 0]))

    def watch(self, batch: PairBatch, outputs: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Numbers to watch of each comparison, with the mask of those that count: [N] each, of rankings [N, K, K].

        Of pairs: implicit rewards, their margin, and whether the preferred completion has the larger one. Of single
        completions whether the reward has the sign of the label; of rankings whether each two are in their order. A tie
        counts as wrong.
        """
        if self.form == "ranking":
            pairs = (batch.present[:, :, None] & batch.present[:, None, :]).triu(1)
            margin = outputs[:, :, None] - outputs[:, None, :]
            return {"margin": (margin, pairs), "accuracy": ((margin > 0).to(outputs), pairs)}
        rows = batch.present.all(1)
        # A loss that divides both log-ratios by their lengths has rewards per token.
        inputs = self._inputs(batch, outputs, average="rejected_lengths" in reads(self.name))
        if self.form == "singles":
            reward = self.beta * (inputs.values[:, 0] - inputs.reference[:, 0])
            good = batch.desirable & rows
            columns = {"chosen_reward": (reward, good), "rejected_reward": (reward, rows & ~good)}
            return columns | {"accuracy": (((reward > 0) == batch.desirable).to(reward), rows)}
        # A reward model's rewards have no reference: the one of zeros.
        values = {name: _READS[name](inputs) for name in reads("preference_metrics")}
        per_pair = _function("preference_metrics")(**values, mask=rows, beta=self.beta)
        return {name: (value, rows) for name, value in per_pair._asdict().items()}

    def metrics(self, batch: PairBatch, outputs: torch.Tensor, losses: torch.Tensor) -> dict[str, Ratio]:
        """The mean loss and what there is to ``watch``, undivided: parts of a batch add up."""
        watched = {"loss": (losses.detach(), batch.present.any(1)), **self.watch(batch, outputs.detach())}
        return {name: _sum(values, counted) for name, (values, counted) in watched.items()}

    def _require_constants(self) -> None:
        """Refuse constants that the loss does not take: it is traced with arguments of one comparison."""
        one, two = ((shape, "float32") for shape in ((1,), (1, 2)))
        kinds = {"desirable": ((1,), "bool"), "rewards": two} | dict.fromkeys(self.statistics, ((), "float32"))
        shapes = {name: jax.ShapeDtypeStruct(*kinds.get(name, one)) for name in (*reads(self.name), *self.statistics)}
        values = {**constants_of(self.name), **self.constants}
        try:
            jax.eval_shape(functools.partial(getattr(rl_fn, self.name), **self.constants), **shapes)
        except ValueError as error:
            raise ValueError(f"loss {self.name}: {error}") from error
        weights = {name: value for name, value in values.items() if name.endswith("desirable_weight")}
        if weights and not any(weights.values()):
            raise ValueError(f"loss {self.name} has nothing to learn: {' and '.join(weights)} are 0")

    def _inputs(self, batch: PairBatch, outputs: torch.Tensor, *, average: bool = False) -> _Inputs:
        counted = batch.counted().to(outputs.dtype)
        reference = torch.zeros_like(outputs)
        if self.needs_reference:
            if batch.ref_logprobs is None:
                raise ValueError(f"{self.name} needs batch.ref_logprobs")
            reference = batch.ref_logprobs
        if average or (self.name in PER_TOKEN if self.average is None else self.average):
            outputs, reference = (x / counted.clamp(min=1.0) for x in (outputs, reference))
        return _Inputs(batch, outputs, reference, counted)

    def _weights(self, batch: PairBatch, outputs: torch.Tensor) -> torch.Tensor:
        counted = batch.counted().to(outputs.dtype)
        # The weight reads the mean over tokens alone: it is that of one token with this mean.
        mean = (outputs.detach() / counted.clamp(min=1.0))[..., None]
        return _function("wpo_weights")(mean, (counted > 0)[..., None]).prod(1)


def constants_of(name: str) -> dict[str, Any]:
    """The loss's constants with their defaults."""
    return {
        parameter.name: parameter.default
        for parameter in _parameters(name).values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in STATISTICS
    }


def reads(name: str) -> tuple[str, ...]:
    """Names of the values that the loss reads of a batch, by its signature.

    >>> reads("rpo")
    ('chosen', 'rejected', 'ref_chosen', 'ref_rejected', 'chosen_lengths')
    """
    return tuple(
        parameter.name
        for parameter in _parameters(name).values()
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name not in ("mask", *STATISTICS)
    )


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(rl_fn, name)).parameters


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    return from_jax(getattr(rl_fn, name))


def _sum(values: torch.Tensor, counted: torch.Tensor) -> Ratio:
    total: Any = torch.where(counted, values, 0.0).sum().double()
    count: Any = counted.sum().double()
    return Ratio(total, count)


# Preferences of a policy: the base of the modules here, and the one over log-probabilities of completions.


class ComparisonScorer(Scorer):
    """A scorer that takes comparisons: what it makes of a completion a subclass says."""

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """One number for each completion, [N, K], with its graph."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it makes of a completion")

    def comparison_parts(self, batch: PairBatch) -> list[PairPart]:
        """The batch in parts that one forward pass takes, where the model computes; as many on all workers."""
        parts = pair_parts(batch, self.micro_batch_tokens(), **self.arranged())
        self.largest_micro_batch = max((part.batch.completions.tokens.numel() for part in parts), default=0)
        parts += [stand_in_pair(batch)] * (self.agreed_count(len(parts)) - len(parts))
        return [part._replace(batch=part.batch.to(self.compute_device())) for part in parts]

    @scores_within_memory
    @torch.no_grad()
    def all_outputs(self, batch: PairBatch) -> torch.Tensor:
        """``outputs`` of the whole batch, [N, K], without a graph."""
        parts = self.comparison_parts(batch)
        return restore_rows([(part.places, self.outputs(part.batch)) for part in parts], batch.present)


class ComparisonModule(Trainable, ComparisonScorer):
    """``train_step`` adds the gradient of a loss of comparisons, micro-batch by micro-batch."""

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        loss: ComparisonLoss,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        self.loss = loss

    @returns("sum")
    @within_memory
    def train_step(
        self, batch: PairBatch, denominator: float, statistics: Mapping[str, float] | None = None
    ) -> dict[str, Ratio]:
        """Add the gradient of Σ losses / ``denominator`` (the whole batch's comparisons); returns undivided metrics.

        A loss that sorts the batch sees only the comparisons of this call: it takes ``backward_through``.
        """
        if self.loss.over_batch:
            raise ValueError(f"{self.loss.name} needs all comparisons at once: use backward_through")
        metrics: dict[str, Any] = {}
        for _, part in self.balanced_pairs(batch):
            outputs = self.outputs(part)
            losses = self.loss(part, outputs, statistics)
            self.backward(losses.sum() / denominator)
            for name, value in self.loss.metrics(part, outputs, losses).items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics | self.balance_metrics()

    @returns("sum")
    @within_memory
    def backward_through(self, batch: PairBatch, gradient: torch.Tensor, finite: bool) -> dict[str, Ratio]:
        """Carry ``gradient`` [N, K], with respect to ``outputs`` of the batch, on to the parameters.

        ``finite``: whether the loss is, for ``optimizer_step``; an infinite one may have a finite gradient. Returns the
        undivided metric of a mixture's load-balancing loss, where the model's configuration asks for one.
        """
        self._losses_are_finite = self._losses_are_finite & finite
        for places, part in self.balanced_pairs(batch):
            outputs = self.outputs(part)
            weights = gradient[places].to(outputs) if len(places) else torch.zeros_like(outputs)
            self.backward_through_values([(outputs, weights)])
        return self.balance_metrics()

    def balanced_pairs(self, batch: PairBatch) -> Iterator[PairPart]:
        """``balanced`` for micro-batches of comparisons."""
        parts = self.comparison_parts(batch)
        return self.balanced(parts, lambda part: self.outputs(part.batch), lambda part: part.batch.completions)


class CompletionScorer(ComparisonScorer, TokenScorer):
    """Log-probabilities of whole completions. A frozen reference is one."""

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """Σ log π over the tokens of each completion that count, [N, K]."""
        return self(batch.completions)[0].sum(1).view(batch.present.shape)

    @returns("rows")
    def completion_logprobs(self, batch: PairBatch) -> torch.Tensor:
        """Σ log π of each completion under the present weights, [N, K]."""
        return self.all_outputs(batch)


class PreferenceModule(ComparisonModule, CompletionScorer):
    """A policy that learns from preferences by a loss of log-probabilities."""


# A reward model: a head of one number, which scores completions.


class RewardModule(ComparisonModule, ValueScorer):
    """A reward model that learns by a loss of rewards. Its ``scores`` of a batch are the rewards of rows."""

    def __init__(self, source: ModelSource, optimizer: OptimizerConfig, loss: ComparisonLoss, **options: Any) -> None:
        """``source`` is a ``ValueSource`` or a ``PretrainedValueSource``; ``options`` are those of every module."""
        super().__init__(source, optimizer, loss, **options)
        if loss.name not in REWARD_LOSSES:
            raise ValueError(f"{loss.name} trains a policy; a reward model takes {' or '.join(REWARD_LOSSES)}")

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion, read after its last token, [N, K]."""
        return self.at_end(batch.completions).view(batch.present.shape)

    @returns("rows")
    def completion_rewards(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion under the present weights, [N, K]."""
        return self.all_outputs(batch)
