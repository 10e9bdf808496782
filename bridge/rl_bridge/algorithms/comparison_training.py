"""Learning from comparisons: DPO and its family without a reward model, and reward models of pairs or ranked lists."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.common.statistics import confidence_interval
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.examples import Example, batch_of
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.train import one_update
from rl_bridge.modules.comparison import ComparisonLoss
from rl_bridge.modules.policy import mean, means

CACHED_AT_ONCE = 1024
"""Examples that the reference scores in one call."""
REWARDS = ("chosen_reward", "rejected_reward")


def with_reference(examples: Sequence[Example], reference: TrainEngine, pad_token_id: int) -> list[Example]:
    """The examples with the reference's log-probabilities, computed once, and how it scores."""
    referenced: list[Example] = []
    scoring = reference.scoring_config()
    for start in range(0, len(examples), CACHED_AT_ONCE):
        part = examples[start : start + CACHED_AT_ONCE]
        scores = reference.completion_logprobs(NeedParallel(batch_of(part, pad_token_id)))
        for example, row in zip(part, scores.tolist(), strict=True):
            logprobs = tuple(row[: len(example.completions)])
            referenced.append(replace(example, ref_logprobs=logprobs, ref_scoring=scoring))
    return referenced


def kl_of(policy: TrainEngine, loss: ComparisonLoss, batch: PairBatch) -> float:
    """KTO's KL to the reference under the present weights, of the second completions: those of other prompts.

    It is in the unit of the log-ratios that the loss compares it with: per token where the loss averages them.
    """
    others = batch.side(1)
    return loss.kl(others, policy.completion_logprobs(NeedParallel(others)))


def statistics_of(
    policy: TrainEngine, loss: ComparisonLoss, batch: PairBatch, outputs: torch.Tensor
) -> dict[str, float]:
    """The statistics that the loss reads, of this batch alone."""
    if "kl" in loss.statistics:
        return {"kl": kl_of(policy, loss, batch)}
    if "delta" in loss.statistics:
        totals = loss.metrics(batch, outputs, outputs.new_zeros(len(outputs)))
        return {"delta": 0.5 * sum(mean(totals[name]) for name in REWARDS)}
    return {}


class BatchStatistics:
    """The numbers of whole batches that a loss reads: KTO's KL of this batch, BCO's moving mean of the ones before."""

    def __init__(self, loss: ComparisonLoss) -> None:
        self._loss = loss
        self.delta = 0.0

    def of(self, policy: TrainEngine, batch: PairBatch) -> dict[str, float]:
        """The statistics under the present weights, of all comparisons wherever they are computed."""
        if "kl" in self._loss.statistics:
            return {"kl": kl_of(policy, self._loss, batch)}
        return {"delta": self.delta} if "delta" in self._loss.statistics else {}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Move the shift towards the middle between the mean rewards of the two sides, where the batch has both."""
        if "delta" in self._loss.statistics and not metrics.get("skipped") and all(name in metrics for name in REWARDS):
            middle = 0.5 * sum(metrics[name] for name in REWARDS)
            momentum = self._loss.shift_momentum
            self.delta = momentum * self.delta + (1 - momentum) * middle

    def checkpoint_state(self) -> dict[str, Any]:
        """The moving mean."""
        return {"delta": self.delta}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        self.delta = state["delta"]


def accumulate(
    policy: TrainEngine, loss: ComparisonLoss, batch: PairBatch, statistics: Mapping[str, float]
) -> dict[str, float]:
    """Add the gradient of the batch's mean loss to the parameters' gradients; returns the metrics.

    A loss that sorts the batch gets every log-probability at once, on the driver, and gives each its gradient: two
    forward passes, the same memory, the same numbers on any number of workers.
    """
    learned = batch.side(0) if loss.form == "singles" else batch
    count = float(len(learned.present))
    if not loss.over_batch:
        totals = policy.train_step(NeedParallel(learned), count, dict(statistics))
        return means(totals)
    outputs = policy.completion_logprobs(NeedParallel(learned)).requires_grad_()
    losses = loss(learned, outputs, statistics)
    (losses.sum() / count).backward()
    finite = bool(torch.isfinite(losses).all())
    balance = policy.backward_through(NeedParallel(learned), NeedParallel(outputs.grad), finite)
    return means(loss.metrics(learned, outputs, losses) | balance)


def comparison_update(
    model: TrainEngine, loss: ComparisonLoss, batch: PairBatch, statistics: BatchStatistics
) -> dict[str, float]:
    """One update on a batch, and its metrics; the statistics move on."""
    numbers = statistics.of(model, batch)
    with one_update(model):
        metrics = accumulate(model, loss, batch, numbers) | numbers | model.optimizer_step()
    statistics.update(metrics)
    return metrics


def held_out_metrics(
    loss: ComparisonLoss, batch: PairBatch, outputs: torch.Tensor, statistics: Mapping[str, float]
) -> dict[str, float]:
    """Loss and metrics of held-out comparisons, and a 95 % interval of the accuracy of pairs, over comparisons."""
    outputs = outputs.detach()
    totals = loss.metrics(batch, outputs, loss(batch, outputs, statistics))
    metrics = {f"held_out_{name}": value for name, value in means(totals).items()}
    right, counted = (
        x.double().flatten(1) if x.dim() > 1 else x.double()[:, None] for x in loss.watch(batch, outputs)["accuracy"]
    )
    rights, counts = (right * counted).sum(1), counted.sum(1)
    accuracy = rights.sum() / counts.sum().clamp(min=1.0)
    # The accuracy is a ratio of sums, which moves with a comparison by what this one is above the ratio (delta method).
    moves = (accuracy + (rights - accuracy * counts) / counts.mean().clamp(min=1.0 / len(counts))).tolist()
    interval = confidence_interval(moves, [0.0] * len(moves), resamples=1000)
    return metrics | {"held_out_accuracy_low": interval["low"], "held_out_accuracy_high": interval["high"]}


def evaluate_preference(policy: TrainEngine, loss: ComparisonLoss, held_out: PairBatch) -> dict[str, float]:
    """Loss, implicit rewards and accuracy on held-out comparisons, with an interval; statistics are their own."""
    learned = held_out.side(0) if loss.form == "singles" else held_out
    outputs = policy.completion_logprobs(NeedParallel(learned))
    return held_out_metrics(loss, learned, outputs, statistics_of(policy, loss, held_out, outputs))


def evaluate_reward_model(model: TrainEngine, loss: ComparisonLoss, held_out: PairBatch) -> dict[str, float]:
    """Loss, rewards and accuracy on held-out comparisons, with an interval."""
    return held_out_metrics(loss, held_out, model.completion_rewards(NeedParallel(held_out)), {})
