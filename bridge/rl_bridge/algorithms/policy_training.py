"""Policy optimisation on rewarded completions (GRPO, RLOO, PPO with a critic …): the loop, and a step's updates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from rl_bridge.algorithms.completions import Sampled, without_signal
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.train import one_update
from rl_bridge.functional import from_jax
from rl_bridge.modules.policy import means
from rl_fn import Batch, Objective, Ratio, effective_sample_size, mismatch_metrics
from rl_fn.objectives.components import Product

# How far the rollout's probabilities are from the trainer's own, before and after what corrects for that.

ALARM = "mismatch/alarm"
_SHARES = ("mismatch/effective_sample_share", "corrected/effective_sample_share")


class Mismatch:
    """Measures on the tokens of a step's updates, before the first of them.

    The ratio is π_old/μ: the trainer's probability of a token over the one that it was sampled with. A rollout with
    the trainer's own weights and arithmetic has ratio 1; a quantised or a stale one has not.
    """

    def __init__(self, objective: Objective, *, least_share: float) -> None:
        """``least_share``: of the tokens as an effective sample, below which the alarm is 1.

        Raises:
            ValueError: it is no share.
        """
        if not 0 <= least_share <= 1:
            raise ValueError(f"least_effective_share must be from 0 to 1, got {least_share}")
        self._least_share, self._alarmed = least_share, False
        self._metrics = from_jax(mismatch_metrics)
        self._sample = from_jax(effective_sample_size)
        parts = _measurable(objective.correction)
        self._weights: Callable[..., Any] | None = None
        if any("rollout_logprobs" in part.required_fields for part in parts):
            correction = Product(parts)
            self._weights = from_jax(lambda batch: 1.0 * correction(batch))

    def metrics(self, parts: Sequence[TokenBatch]) -> dict[str, float]:
        """Metrics of these parts together, whose ``old_logprobs`` are the trainer's own. None without a token.

        ``mismatch/…`` are rl_fn's MismatchMetrics of the ratios as they are. ``corrected/…`` are of the weights that a
        correction makes of them: their mean, the share of tokens with another weight than the ratio, and the effective
        sample. Parts of a product that read what is not measured here, as entropies, are left out.
        """
        if not parts or not any(bool(part.mask.any()) for part in parts):
            return {}
        old, rollout, mask, advantages = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("old_logprobs", "rollout_logprobs", "mask", "advantages")
        )
        metrics = {f"mismatch/{n}": float(x) for n, x in self._metrics(old, rollout, mask)._asdict().items()}
        if self._weights is not None:
            turns = None
            if parts[0].segment_ids is not None:
                turns = torch.cat([part.segment_ids for part in parts if part.segment_ids is not None])
            fields: Any = (old, old, advantages, mask)
            named: Any = {"rollout_logprobs": rollout, "segment_ids": turns}
            batch = Batch(*fields, **named)
            weights, count = self._weights(batch), float(mask.sum())
            ratios = (old - rollout).exp()
            changed = ((weights - ratios).abs() > 1e-4 * ratios) & mask
            metrics["corrected/weight_mean"] = float(weights[mask].mean())
            metrics["corrected/changed_share"] = float(changed.sum()) / count
            metrics["corrected/effective_sample_share"] = float(self._sample(weights, mask)) / count
        least = min(metrics[name] for name in _SHARES if name in metrics)
        return metrics | {ALARM: float(least < self._least_share)}

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """The text to print at the first alarm; None at others."""
        if self._alarmed or not metrics.get(ALARM):
            return None
        self._alarmed = True
        shares = ", ".join(f"{metrics[name]:.2f} ({name})" for name in _SHARES if name in metrics)
        return (
            f"the rollout samples from another policy than the trainer's: its tokens count as a share of {shares}, and "
            f"least_effective_share is {self._least_share:g}; what follows is in the metric {ALARM}"
        )


def _measurable(correction: Any) -> tuple[Any, ...]:
    """The parts of a correction that read nothing of a batch but its log-probabilities and advantages."""
    parts = correction.parts if isinstance(correction, Product) else () if correction is None else (correction,)
    return tuple(part for part in parts if {*part.required_fields} <= {"rollout_logprobs"})


def policy_update(
    policy: TrainEngine,
    minibatch: TokenBatch,
    denominator: float,
    tokens: int,
    terms: Mapping[str, float],
    *marks: NeedParallel,
) -> dict[str, float]:
    """One update of a policy on one of ``shares_of``, and its metrics. ``terms`` and ``marks``: of ``train_step``."""
    with one_update(policy):
        totals = policy.train_step(NeedParallel(minibatch), denominator, dict(terms), *marks)
        loss_metrics = over_counted(totals, denominator, tokens)
        return means(loss_metrics, sums=("policy_loss",)) | policy.optimizer_step()


def watched_rows(policy: TrainEngine) -> dict[int, dict[str, list[float]]]:
    """Values in the loss of each row that ``policy_update`` was given a number for, since the last call."""
    rows: dict[int, dict[str, list[float]]] = {}
    for of_worker in policy.take_watched():
        rows |= of_worker
    return rows


def critic_update(critic: TrainEngine, minibatch: TokenBatch, denominator: float) -> dict[str, float]:
    """One update of a critic on one of ``shares_of``, and its metrics."""
    with one_update(critic):
        totals = critic.train_step(NeedParallel(minibatch), denominator)
        update = {f"critic_{name}": value for name, value in critic.optimizer_step().items()}
    return means(totals) | update


def shares_of(
    batch: TokenBatch, computed: torch.Tensor, counted: torch.Tensor, denominator: Callable[..., Any], count: int
) -> Iterator[tuple[TokenBatch, float, torch.Tensor, int]]:
    """``count`` shares of a batch: rows to compute, the loss's denominator, the rows' places, tokens that count.

    ``computed`` [N] and ``counted`` [N, L] are an objective's selection, ``denominator`` its function of tokens and
    turns.
    """
    for index, rows, mask in minibatches_of(computed, counted, count):
        turns = None if batch.segment_ids is None else batch.segment_ids[rows]
        yield batch.rows(index), float(denominator(mask, turns)), index, int(mask.sum())


def require_updates(sampled: Sampled, count: int) -> None:
    """Refuse more updates of a step than there are completions. Those that a selection left may be fewer.

    Raises:
        ValueError: with both numbers.
    """
    drawn = sampled.sampled_groups * sampled.rewards.shape[1]
    if isinstance(count, Integral) and count > drawn:  # another count is refused where it cuts the rows
        raise ValueError(
            f"updates={count} are parts of a step's completions, and {drawn} were drawn: at most one a completion"
        )


def over_counted(totals: Mapping[str, Any], denominator: float, tokens: int) -> dict[str, Any]:
    """Undivided metrics of the computed rows → those of all rows that count, where these are known.

    A row is left out for its advantages of 0: it adds nothing to the policy's loss, and no clip cuts a gradient that it
    does not have. What its ratio, entropy or KL would be is not known: these are of the computed rows.
    """
    denominators = {"policy_loss": denominator, "clip_fraction": tokens}
    return {
        name: Ratio(value.total, denominators[name]) if name in denominators else value  # type: ignore[arg-type]
        for name, value in totals.items()
    }


def minibatches_of(
    computed: torch.Tensor, counted: torch.Tensor, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Cut an objective's ``selection`` into ``count`` shares: rows to compute, rows that count, and their mask.

    ``computed`` is [N], ``counted`` is [N, T]. A share without a row to compute has no gradient and makes no update.

    Raises:
        ValueError: a ``count`` that is no number of updates.
    """
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(f"updates is the number of a batch's updates, whole and at least 1, got {count!r}")
    for share in counted.any(1).nonzero()[:, 0].tensor_split(count):
        index = share[computed[share]]
        if len(index):
            yield index, share, counted[share]


MANY = 0.5
"""A share of completions without an end that a user should hear of."""


class Remarks:
    """Lines about steps that give no update, and about completions without an end."""

    def __init__(self) -> None:
        self._cut, self._idle = False, 0

    def of_step(self, sampled: Sampled, computed: torch.Tensor, truncated: float, limit: str) -> Iterator[str]:
        """The lines of a step. ``computed`` [N]: rows with a gradient. ``truncated``: share of completions cut at
        ``limit``, an option by its name."""
        if not bool(computed.any()):
            self._idle += 1
            if self._idle.bit_count() == 1:  # the 1st, 2nd, 4th … of this session: not a line each
                yield without_signal(sampled) + (f"; {self._idle} such steps" if self._idle > 1 else "")
        if not self._cut and truncated >= MANY:
            self._cut = True
            yield (
                f"{truncated:.0%} of the completions were cut at {limit}: their rewards are of beginnings. The "
                "metric truncated has what follows"
            )
