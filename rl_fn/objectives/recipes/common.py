"""What all recipes share: hyper-parameters as pieces, absent where their coefficient is 0."""

from typing import Any

from rl_fn._numerics import Number
from rl_fn.objectives.components import KL, Aggregation, Entropy, Product, TruncatedImportance, ValueLoss
from rl_fn.objectives.objective import Objective


def optional(value: Number | None) -> float | None:
    """Return the number as a float, or None."""
    return None if value is None else float(value)


def assemble(
    name: str,
    advantage: Any,
    loss: Any,
    mode: str,
    *,
    kl_estimator: str,
    kl_coef: Number,
    entropy_coef: Number,
    correction_cap: Number | None = None,
    correction: Any = None,
    max_completion_length: Number | None = None,
    reward_kl_coef: Number = 0.0,
    value: ValueLoss | None = None,
) -> Objective:
    """Return the objective; a cap adds truncated importance weights to the recipe's own correction."""
    if correction_cap is not None:
        weights = TruncatedImportance(float(correction_cap))
        correction = weights if correction is None else Product((correction, weights))
    return Objective(
        name=name,
        advantage=advantage,
        loss=loss,
        aggregation=Aggregation(mode, optional(max_completion_length)),
        kl=KL(kl_estimator, float(kl_coef)) if kl_coef else None,
        correction=correction,
        entropy=Entropy(float(entropy_coef)) if entropy_coef else None,
        reward_kl=KL("k1", float(reward_kl_coef)) if reward_kl_coef else None,
        value=value,
    )
