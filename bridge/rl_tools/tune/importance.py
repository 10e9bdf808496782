"""How much of a goal each parameter explains: permutation importance over scikit-learn's random forest."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST = 8
"""Complete trials below which nothing is said."""
METHOD = "permutation importance over a random forest (scikit-learn): the increase of its squared error, as shares"


def importance(
    space: Sequence[dict[str, Any]] | str, goals: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """``shares``: parameter → share, largest first; empty with the ``reason`` why there are none.

    Choices are numbers in their order, and a parameter that does not apply has a value of its own. The forest has seen
    the trials that it is asked about: the shares rank parameters, and are no test of significance.
    """
    name = goals[0]["name"]
    complete = [trial for trial in trials if trial["status"] == "complete"]
    if isinstance(space, str):
        return {"shares": {}, "method": METHOD, "reason": "a function proposes: there is no space"}
    if len(complete) < LEAST:
        return {"shares": {}, "method": METHOD, "reason": f"{len(complete)} complete trials, {LEAST} are needed"}
    if importlib.util.find_spec("sklearn") is None:
        return {"shares": {}, "method": METHOD, "reason": "scikit-learn is not installed: pip install '.[tune]'"}
    ensemble: Any = importlib.import_module("sklearn.ensemble")
    inspection: Any = importlib.import_module("sklearn.inspection")
    inputs = np.array([[position(p, trial["assignment"]) for p in space] for trial in complete])
    values = np.array([trial["values"][name]["mean"] for trial in complete])
    if np.ptp(values) == 0:
        return {"shares": {}, "method": METHOD, "reason": f"{name} is the same in all trials"}
    forest = ensemble.RandomForestRegressor(n_estimators=100, min_samples_leaf=2, random_state=0, n_jobs=1).fit(
        inputs, values
    )
    found = inspection.permutation_importance(forest, inputs, values, n_repeats=10, random_state=0, n_jobs=1)
    means = np.maximum(np.asarray(found["importances_mean"], np.float64), 0.0)
    shares = means / max(float(means.sum()), 1e-12)
    ranked = sorted(zip(space, shares, strict=True), key=lambda pair: -pair[1])
    return {"shares": {p["name"]: round(float(share), 4) for p, share in ranked}, "method": METHOD, "reason": ""}


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
