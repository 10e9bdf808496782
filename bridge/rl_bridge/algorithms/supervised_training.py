"""Supervised fine-tuning: an update, and the loss of held-out rows. It stands alone, an algorithm like the others."""

from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.train import one_update
from rl_bridge.modules.policy import mean


def supervised_update(policy: TrainEngine, batch: TokenBatch) -> dict[str, float]:
    """One update on the tokens that count, and its metrics.

    Raises:
        ValueError: no token counts, so that there is nothing to learn.
    """
    counted = float(batch.mask.sum())
    if not counted:
        raise ValueError(
            f"none of the {int(batch.lengths.sum())} tokens in the batch's {len(batch.mask)} rows counts: mask must be "
            "True where a token is to be learnt"
        )
    with one_update(policy):
        totals = policy.train_step(NeedParallel(batch), counted)
        return {name: mean(value) for name, value in totals.items()} | policy.optimizer_step()


def held_out_nll(policy: TrainEngine, batch: TokenBatch) -> float:
    """Mean negative log-likelihood of the tokens that count, under the present weights."""
    return mean(policy.nll(NeedParallel(batch))["nll"])


def supervised_batch(rows: Sequence[Any], to_trajectory: Callable[[Any], Trajectory], pad_token_id: int) -> TokenBatch:
    """The rows' own completions as if they had been sampled."""
    return collate([to_trajectory(row) for row in rows], pad_token_id)
