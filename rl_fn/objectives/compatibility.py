"""Combinations of pieces that cannot mean what they say: each is refused with the reason and the remedy."""

from typing import Any

from rl_fn.aggregation import MODES
from rl_fn.objectives.components import GAE, KL, Aggregation, RolloutEstimator, ValueLoss, WhitenedReturns


def refuse_impossible(
    *,
    name: str,
    advantage: Any,
    loss: Any,
    aggregation: Aggregation,
    kl: KL | None,
    correction: Any,
    reward_kl: KL | None,
    value: ValueLoss | None,
) -> None:
    """Raise ValueError with the reason and the remedy if these pieces do not go together."""
    modes = getattr(loss, "modes", MODES)
    if aggregation.mode not in modes:
        raise ValueError(
            f"{name}: {loss} is the loss of a whole sequence at each of its tokens, which {aggregation.mode!r} would "
            f"weight wrongly: aggregate by one of {', '.join(modes)}, or take a loss per token (GSPOToken for GSPO, "
            "level='token' for DRO and Kimi)"
        )
    per_token = (
        isinstance(advantage, GAE) or getattr(advantage, "per_token", False) or _per_token_penalty(advantage, reward_kl)
    )
    if per_token and getattr(loss, "sequence", False):
        raise ValueError(
            f"{name}: {advantage} gives each token its own advantage, which the sequence ratio of {loss} spreads over "
            "the whole answer: take GSPOToken, or one advantage an answer (GroupNormalised)"
        )
    if getattr(correction, "weighs_rollout", False) and getattr(loss, "weighs_rollout", False):
        raise ValueError(
            f"{name}: {loss} already weighs by the ratio to rollout_logprobs, and {correction} would count it twice: "
            "drop the correction (correction=None), or take a loss whose ratio is to old_logprobs (Clip for "
            "DecoupledClip, behaviour='old' for VESPO, TOPR and DPPO)"
        )
    if kl is not None and reward_kl is not None:
        raise ValueError(
            f"{name}: the KL to the reference is in the reward ({reward_kl}) and in the loss ({kl}), which penalises "
            "it twice: keep one (kl=None or reward_kl=None)"
        )
    if reward_kl is not None and not _takes_penalty(advantage):
        raise ValueError(
            f"{name}: the rewards of {advantage} cannot hold a KL penalty: put it into the loss (kl=..., "
            "reward_kl=None)"
        )
    if value is not None and not isinstance(advantage, GAE):
        raise ValueError(
            f"{name}: {value} trains a critic, which {advantage} does not use: drop it (value=None), or take the "
            "advantage from the critic (GAE)"
        )


def _per_token_penalty(advantage: Any, reward_kl: KL | None) -> bool:
    """Return whether a penalty on each token makes advantages differ inside an answer; most estimators sum it."""
    return reward_kl is not None and isinstance(advantage, WhitenedReturns)


def _takes_penalty(advantage: Any) -> bool:
    return not isinstance(advantage, RolloutEstimator) or advantage.takes_penalty
