"""Every row, alone or beside others and in chunks of any size, is cut to the set that a sort finds."""

import importlib
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_kernels.sampling import cutoff
from tests.kernels.operations import sample

KINDS = ("flat", "peaked", "ties", "equal", "one token", "nothing")


def _row(kind, size, generator):
    x = torch.randn(size, generator=generator)
    if kind in ("one token", "nothing"):
        x = x.masked_fill(torch.arange(size) != (size // 3 if kind == "one token" else -1), -torch.inf)
    else:
        x = {"flat": 0.1 * x, "peaked": 9 * x, "ties": (2 * x).round(), "equal": 0 * x}[kind]
    return x


def _prefix(x, k, p):
    """Ids of the shortest prefix of (value falling, id rising), of k tokens at most, with p of their integer mass."""
    order = x.sort(descending=True, stable=True).indices[: min(k, int((x > -torch.inf).sum()))].tolist()
    each = cutoff.masses(x[None], x.amax()[None])[0, order].tolist()
    target = max(1, int(torch.ceil(p.double() * sum(each))))
    return sorted(n for n, before in zip(order, accumulate(each, initial=0), strict=False) if before < target)


def _sets(x, found):
    return [row.nonzero()[:, 0].tolist() for row in cutoff.allowed(x, found.key, found.last)]


@settings(deadline=None, max_examples=80)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    size=st.integers(64, 700),
    p=st.sampled_from([1e-30, 1e-7, 0.1, 0.5, 0.9, 0.999, 1 - 2.0**-24]) | st.floats(0.01, 0.99),
    k=st.sampled_from([10_000, 10_000, 40]),
    chunk=st.sampled_from([1, 1000, 1 << 17]),
    seed=st.integers(0, 1000),
)
def test_any_row_has_the_set_of_a_sort(kinds, size, p, k, chunk, seed):
    """By mass alone, or of the k largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.stack([_row(kind, size, generator) for kind in kinds])
    number, share = torch.full((len(x),), k), torch.full((len(x),), p)
    with pytest.MonkeyPatch.context() as patch:
        # k is beyond what is listed, so that a number and a mass cut.
        for name, value in (("CACHED", chunk), ("SORTED", 16), ("FEW", 8)):
            patch.setattr(cutoff, name, value)
        found = cutoff.find(x, number, share, torch.full((len(x),), -torch.inf))
    assert _sets(x, found) == [_prefix(row, k, share[0]) for row in x]
    assert found.partial.tolist() == [
        bool(mine) and int((row[mine] == row[mine].amin()).sum()) < int((row == row[mine].amin()).sum())
        for row, mine in zip(x, _sets(x, found), strict=True)
    ]


@pytest.mark.parametrize("cached", [1, 8000, 1 << 17])
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"top_k": 1500, "top_p": 0.9}, {"min_p": 0.5}])
def test_sums_in_chunks_of_any_size_are_the_same(monkeypatch, cached, cut):
    """To the last bit: the rows of a chunk share its memory and nothing else."""
    module = importlib.import_module("rl_kernels.sampling.torch")
    x = torch.randn(7, 4000, generator=torch.Generator().manual_seed(7))
    x[3, 100:] = -torch.inf
    whole = sample(x, **cut, seed=1, position=torch.arange(7), return_allowed_tokens=True)
    monkeypatch.setattr(module, "_CACHED", cached)
    for got, expected in zip(
        sample(x, **cut, seed=1, position=torch.arange(7), return_allowed_tokens=True), whole, strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_numbers_is_refused_and_harms_no_other(bad):
    x = 0.1 * torch.randn(3, 4000, generator=torch.Generator().manual_seed(6))
    arguments = {"top_p": 0.9, "seed": 1, "position": 2, "check": False}
    fine = sample(x[[0, 2]], **arguments)
    x[1, 16] = bad
    both = sample(x, **arguments)
    assert both.tokens[1] == -1 and torch.equal(both.allowed_count[[0, 2]], fine.allowed_count)
    with pytest.raises(ValueError, match=r"in rows \[1\]"):
        sample(x, **(arguments | {"check": True}))
