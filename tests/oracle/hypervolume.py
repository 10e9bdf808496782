"""Oracle of hypervolumes: inclusion and exclusion over all subsets of points."""

import itertools

import numpy as np

from tests.oracle.base import f64


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
