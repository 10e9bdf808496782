"""Oracle of several objectives: scalarisations, Pareto fronts, hypervolume."""

import itertools
import math

import numpy as np

from tests.oracle.base import f64

# Oracle of several objectives: pairs and neighbours, one by one.


def _worse(objectives, maximize):
    """Objectives turned so that smaller is better."""
    return f64(objectives) * np.where(maximize, -1.0, 1.0)


def weighted_sum(objectives, weights, *, maximize):
    return _worse(objectives, maximize) @ f64(weights)


def tchebycheff(objectives, weights, ideal, *, maximize, rho):
    shortfall = _worse(objectives, maximize) - _worse(ideal, maximize)
    return (f64(weights) * shortfall).max(-1) + rho * shortfall.sum(-1)


def pareto_mask(points, *, maximize):
    costs, out = _worse(points, maximize), np.zeros(points.shape[:-1], bool)
    for row in np.ndindex(costs.shape[:-2]):
        for i, p in enumerate(costs[row]):
            out[row][i] = not any(all(q <= p) and any(q < p) for q in costs[row])
    return out


def crowding_distance(points):
    x, out = f64(points), np.zeros(points.shape[:-1])
    for row in np.ndindex(x.shape[:-2]):
        for m in range(x.shape[-1]):
            column = x[row][:, m]
            order = sorted(range(column.size), key=lambda i, c=column: (c[i], i))
            span = column.max() - column.min()
            for rank, i in enumerate(order):
                if span > 0:
                    end = rank in (0, column.size - 1)
                    out[row][i] += math.inf if end else (column[order[rank + 1]] - column[order[rank - 1]]) / span
    return out


# Oracle of hypervolumes: inclusion and exclusion over all subsets of points.


def hypervolume(points, reference, *, maximize):
    sign = np.where(maximize, 1.0, -1.0)
    gains = np.maximum((f64(points) - f64(reference)) * sign, 0.0)
    total = 0.0
    for size in range(1, len(gains) + 1):
        for chosen in itertools.combinations(gains, size):
            total += (-1) ** (size + 1) * np.prod(np.min(chosen, axis=0))
    return total


def hypervolume_contribution(points, reference, *, maximize):
    whole = hypervolume(points, reference, maximize=maximize)
    return [whole - hypervolume(np.delete(points, i, axis=0), reference, maximize=maximize) for i in range(len(points))]
