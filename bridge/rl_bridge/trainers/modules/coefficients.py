"""Coefficients of an objective's terms as arguments: a controller changes them between steps without a new trace."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rl_fn import Objective

TERMS = ("kl", "reward_kl", "entropy")
"""Slots of an objective whose component has a ``coef``."""


def with_coefficients(objective: Objective, coefficients: Mapping[str, Any]) -> Objective:
    """The objective with other coefficients of the terms it has.

    >>> import rl_fn
    >>> with_coefficients(rl_fn.recipes.grpo(), {"kl": 0.5}).kl
    KL(estimator='k3', coef=0.5)
    """
    terms = {name: replace(getattr(objective, name), coef=coef) for name, coef in coefficients.items()}
    return objective.replace(**terms) if terms else objective


def share_of(objective: Objective) -> Callable[..., Any]:
    """``objective.share`` with the coefficients as its last argument."""

    def share(batch: Any, denominator: Any, coefficients: Mapping[str, Any]) -> Any:
        return with_coefficients(objective, coefficients).share(batch, denominator)

    return share
