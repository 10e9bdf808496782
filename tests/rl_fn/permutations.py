"""What works on sets and lists: how to call it, and what becomes of its result when the members change places.

`PERMUTED["name"]`: of the functions that run on the host, and of the fronts. A new function on the host fails in
test_registry.py until it is here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import rl_fn

Call = tuple[tuple[Any, ...], dict[str, Any]]
N, M, CAPACITY = 9, 3, 60


@dataclasses.dataclass(frozen=True)
class Permuted:
    """draw: arguments of which the first has the members, along `axis`.

    expected: the result for the members in a given order, from the arguments and the result in the old order.
    seen: what is compared of a result.
    """

    draw: Callable[[np.random.Generator], Call]
    expected: Callable[[Call, Any, np.ndarray], Any]
    axis: int = 0
    seen: Callable[[Call, Any], Any] = lambda call, result: result


def _lengths(rng: np.random.Generator) -> np.ndarray:
    """With zeros, and some that are equal."""
    return rng.integers(0, 30, N)


def _points(rng: np.random.Generator) -> Call:
    points = rng.normal(size=(N, M)) + 0.7
    points[3] = points[5]
    return (points, np.zeros(M)), {"maximize": (True, False, True)}


def _front(rng: np.random.Generator) -> Call:
    points = rng.integers(0, 5, (2, N, M)).astype(np.float32)
    return (points,), {"maximize": (True, False, True)}


def _parts(call: Call, parts: list[np.ndarray]) -> Any:
    """Lengths in each part, whichever of two equal items that is, and whether each item is in one part."""
    lengths = call[0][0]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    return sorted(sorted(lengths[part].tolist()) for part in parts)


def _pieces(call: Call, ids: np.ndarray) -> list[np.ndarray]:
    return np.split(ids, np.cumsum(call[0][0])[:-1])


def _same(call: Call, result: Any, order: np.ndarray) -> Any:
    return result


def _members(call: Call, result: Any, order: np.ndarray) -> Any:
    return np.asarray(result)[..., order]


def _moved_ids(call: Call, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Sequences are numbered by their place."""
    pieces = _pieces(call, ids)
    return np.concatenate([np.full(len(pieces[i]), place) for place, i in enumerate(order)])


def _moved_positions(call: Call, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    pieces = _pieces(call, ids)
    return np.concatenate([pieces[i] for i in order])


def _whole(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(N, 8, 2))


def _split_rows(call: Call, shards: np.ndarray, order: np.ndarray) -> np.ndarray:
    return shards[:, order]


PERMUTED = {
    "balance": Permuted(lambda rng: ((_lengths(rng), 3), {}), _same, seen=_parts),
    "pack": Permuted(lambda rng: ((_lengths(rng), CAPACITY), {}), _same, seen=_parts),
    "segment_ids": Permuted(lambda rng: ((_lengths(rng),), {}), _moved_ids),
    "position_ids": Permuted(lambda rng: ((_lengths(rng),), {}), _moved_positions),
    "zigzag_split": Permuted(lambda rng: ((_whole(rng), 2), {"axis": 1}), _split_rows),
    "zigzag_gather": Permuted(
        lambda rng: ((rl_fn.zigzag_split(_whole(rng), 2, axis=1),), {"axis": 1}),
        lambda call, whole, order: whole[order],
        axis=1,
    ),
    "hypervolume": Permuted(_points, _same),
    "hypervolume_contribution": Permuted(_points, _members),
    "pareto_mask": Permuted(_front, _members, axis=1),
    "crowding_distance": Permuted(lambda rng: ((rng.normal(size=(2, N, M)).astype(np.float32),), {}), _members, axis=1),
}
