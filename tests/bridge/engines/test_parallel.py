"""Cutting and joining: the laws, and an executor of three workers behind an engine."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.parallel import gather, scatter
from rl_fn import Ratio


class Pair(NamedTuple):
    first: torch.Tensor
    second: list | None


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a, "_fields"):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def rows_of(kind, rows):
    tensor = torch.arange(rows * 3).view(rows, 3)
    values = list(range(rows))
    return {
        "tensor": tensor,
        "list": values,
        "vector": tensor[:, 0],
        "tuple of both": Pair(tensor, values),
        "absent field": Pair(tensor, None),
        "batch": TokenBatch(tensor, tensor > 3, tensor[:, 0], tensor[:, 1], advantages=tensor.float()),
    }[kind]


KINDS = ["tensor", "list", "vector", "tuple of both", "absent field", "batch"]


@given(kind=st.sampled_from(KINDS), rows=st.integers(1, 20), parts=st.integers(1, 6))
def test_gather_undoes_split(kind, rows, parts):
    data = rows_of(kind, rows)
    if rows < parts:
        with pytest.raises(ValueError, match=f"{rows} rows cannot be split over {parts} workers"):
            NeedParallel(data).split(parts)
        return
    shares = NeedParallel(data).split(parts)
    assert len(shares) == parts
    assert same(gather(shares), data)
    sizes = [len(share[0] if isinstance(share, tuple) else share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_what_has_no_rows_is_refused():
    for data in ("text", 3, {"a": 1}):
        with pytest.raises(TypeError, match="NeedParallel takes a tensor, a NamedTuple of tensors or a sequence"):
            NeedParallel(data).split(2)


def test_the_sequence_axis_needs_another_executor():
    data = torch.zeros(4, 4)
    assert NeedParallel(data, over="sequence").split(1)[0] is data
    with pytest.raises(NotImplementedError, match="ring attention"):
        NeedParallel(data, over="sequence").split(2)


def test_scatter_splits_what_asks_for_it_and_repeats_the_rest():
    shares = scatter((NeedParallel([1, 2, 3]), "all"), {"b": NeedParallel([4, 5, 6]), "c": 7}, 3)
    assert shares == [(([i], "all"), {"b": [i + 3], "c": 7}) for i in (1, 2, 3)]


def test_ratios_add():
    parts = [Ratio(torch.tensor(1.0), torch.tensor(2.0)), Ratio(torch.tensor(3.0), torch.tensor(4.0))]
    joined = gather([{"loss": part} for part in parts])["loss"]
    assert isinstance(joined, Ratio) and (float(joined.total), float(joined.denominator)) == (4.0, 6.0)


@pytest.mark.parametrize("values", [[1, 1], [1.5, 1.5], ["a", "a"], [None, None], [torch.tensor(2), torch.tensor(2)]])
def test_equal_values_are_one_value(values):
    assert same(gather(values), values[0])


@pytest.mark.parametrize("values", [[1, 2], ["a", "b"], [None, 1], [torch.tensor(1), torch.tensor(2)], [1.0, 1.0, 2.0]])
def test_disagreement_raises(values):
    with pytest.raises(ValueError, match="workers disagree on a result that should be the same on all"):
        gather(values)


class ThreeWorkers:
    """What an executor of several processes does, without the processes."""

    size = 3

    def __init__(self, factory):
        self._factory, self._workers = factory, []

    def build(self, colocate_with, not_colocate_with):
        self._workers = [self._factory() for _ in range(self.size)]

    def call(self, method, shares):
        return [getattr(w, method)(*a, **k) for w, (a, k) in zip(self._workers, shares, strict=True)]

    def device(self):
        return torch.device("cpu")


class Worker:
    def __init__(self):
        self.rows = 0

    def see(self, rows, scale):
        self.rows = len(rows)
        return {"rows": rows * scale, "count": Ratio(torch.tensor(float(len(rows))), torch.tensor(1.0)), "scale": scale}

    def how_many(self):
        return [self.rows]


def test_an_engine_of_three_workers_is_called_like_one(monkeypatch):
    monkeypatch.setitem(__import__("rl_bridge.executors", fromlist=["_"])._EXECUTORS, "three", ThreeWorkers)
    engine = TrainEngine(Worker, executor="three").build()
    assert engine.workers == 3
    rows = torch.arange(8.0)
    result = engine.see(NeedParallel(rows), scale=2)
    assert torch.equal(result["rows"], 2 * rows) and result["scale"] == 2
    assert (float(result["count"].total), float(result["count"].denominator)) == (8.0, 3.0)
    assert engine.how_many() == [2, 3, 3]
