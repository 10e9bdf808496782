"""How much of a goal each parameter explains: Optuna's PED-ANOVA."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_tools.tune.journal import library

LEAST = 8
"""The fewest complete trials of which shares are computed."""
METHOD = "PED-ANOVA (Optuna): how far the best tenth of the trials lies from all of them, as shares"


def importance(
    space: Sequence[dict[str, Any]] | str, goals: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """``shares``: parameter → share, largest first; empty with the ``reason`` why there are none.

    A parameter that does not always apply counts with the trials that have it. The shares rank parameters, and are no
    test of significance.
    """
    name = goals[0]["name"]
    complete = [trial for trial in trials if trial["status"] == "complete"]
    if isinstance(space, str):
        return {"shares": {}, "method": METHOD, "reason": "a function proposes: there is no space"}
    if len(complete) < LEAST:
        return {"shares": {}, "method": METHOD, "reason": f"{len(complete)} complete trials, {LEAST} are needed"}
    try:
        optuna = library("optuna")
    except ModuleNotFoundError as error:
        return {"shares": {}, "method": METHOD, "reason": str(error)}
    values = [trial["values"][name]["mean"] for trial in complete]
    if min(values) == max(values):
        return {"shares": {}, "method": METHOD, "reason": f"{name} is the same in all trials"}
    study = optuna.create_study(direction="maximize" if goals[0]["maximize"] else "minimize")
    domains = {parameter["name"]: _distribution(optuna.distributions, parameter["domain"]) for parameter in space}
    for trial, value in zip(complete, values, strict=True):
        distributions = {name: domains[name] for name in trial["assignment"]}
        study.add_trial(optuna.trial.create_trial(params=trial["assignment"], distributions=distributions, value=value))
    shares = optuna.importance.get_param_importances(study)
    ranked = sorted(shares.items(), key=lambda pair: -pair[1])
    return {"shares": {name: round(float(share), 4) for name, share in ranked}, "method": METHOD, "reason": ""}


def _distribution(distributions: Any, domain: dict[str, Any]) -> Any:
    if domain["kind"] == "Choice":
        return distributions.CategoricalDistribution(domain["values"])
    kind = distributions.IntDistribution if domain["whole"] else distributions.FloatDistribution
    return kind(domain["low"], domain["high"], log=domain["log"])


def position(parameter: dict[str, Any], assignment: dict[str, Any]) -> float:
    """Where a value lies in its domain, from 0 to 1; −0.5 where the parameter does not apply."""
    if parameter["name"] not in assignment:
        return -0.5
    value, domain = assignment[parameter["name"]], parameter["domain"]
    if domain["kind"] == "Choice":
        return domain["values"].index(value) / (len(domain["values"]) - 1)
    low, high = domain["low"], domain["high"]
    if domain["log"]:
        return float(np.log(value / low) / np.log(high / low))
    return (value - low) / (high - low)
