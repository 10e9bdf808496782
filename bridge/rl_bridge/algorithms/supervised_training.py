"""Supervised fine-tuning: an update, and the loss of held-out rows. It stands alone, an algorithm like the others."""

from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.train import one_update
from rl_bridge.modules.policy import mean, means


def supervised_update(policy: TrainEngine, batch: TokenBatch) -> dict[str, float]:
    """One update on the tokens that count, and its metrics.

    Raises:
        ValueError: no token counts, so that there is nothing to learn.
    """
    require_counted(batch, "learnt")
    counted = float(batch.mask.sum())
    with one_update(policy):
        totals = policy.train_step(NeedParallel(batch), counted)
        return means(totals) | policy.optimizer_step()


def held_out_nll(policy: TrainEngine, batch: TokenBatch) -> float:
    """Mean negative log-likelihood of the tokens that count, under the present weights.

    Raises:
        ValueError: no token counts, so that there is nothing to measure.
    """
    require_counted(batch, "measured")
    return mean(policy.nll(NeedParallel(batch))["nll"])


def require_counted(batch: TokenBatch, done: str) -> None:
    """Refuse rows of which no token counts. ``done``: what happens to those that do.

    Raises:
        ValueError: with the number of tokens and rows.
    """
    if not bool(batch.mask.any()):
        raise ValueError(
            f"none of the {int(batch.lengths.sum())} tokens in the batch's {len(batch.mask)} rows counts: mask must be "
            f"True where a token is to be {done}"
        )


def supervised_batch(rows: Sequence[Any], to_trajectory: Callable[[Any], Trajectory], pad_token_id: int) -> TokenBatch:
    """The rows' own completions as if they had been sampled."""
    return collate([to_trajectory(row) for row in rows], pad_token_id)
