"""How results of several workers become one: as declared, and by nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.engines import returns
from rl_bridge.engines.dispatch import declared, join
from rl_fn import Ratio


def test_sums():
    parts = [{"loss": Ratio(torch.tensor(i), torch.tensor(2.0)), "rows": 2} for i in (1.0, 3.0)]
    joined = join(parts, "sum", "test")
    assert isinstance(joined["loss"], Ratio)
    assert (float(joined["loss"].total), float(joined["loss"].denominator), joined["rows"]) == (4.0, 4.0, 4)
    assert join([(1, [2.0]), (3, [4.0])], "sum", "test") == (4, [6.0])


def test_sums_that_are_none():
    with pytest.raises(ValueError, match="test is declared a sum, and returns None"):
        join([None, None], "sum", "test")
    with pytest.raises(ValueError, match=r"workers return other keys: \[\['a'\], \['b'\]\]"):
        join([{"a": 1}, {"b": 1}], "sum", "test")


def test_rows_of_other_widths_are_padded_with_zeros():
    joined = join([torch.ones(1, 3), torch.ones(2, 2)], "rows", "test")
    assert joined.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), depth=st.integers(0, 2)
)
def test_parts_of_any_rows_and_widths_keep_their_numbers(shapes, depth):
    parts = [torch.full((rows, width, *[2] * depth), float(n + 1)) for n, (rows, width) in enumerate(shapes)]
    joined = join(parts, "rows", "test")
    assert joined.shape == (sum(rows for rows, _ in shapes), max(width for _, width in shapes), *[2] * depth)
    for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        assert torch.equal(rows[:, : part.shape[1]], part) and not rows[:, part.shape[1] :].any()


@pytest.mark.parametrize("value", [torch.tensor(1.0), 3, None, "text"])
def test_what_is_no_row(value):
    with pytest.raises(ValueError, match="test is declared rows, and returns"):
        join([value, value], "rows", "test")


@pytest.mark.parametrize(
    "value", [1, 1.5, "a", None, math.nan, torch.tensor([2, 3]), {"a": [1, (2.0, None)]}, [], {"n": math.nan}]
)
def test_same(value):
    assert join([value, value], "same", "test") is value


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        ["a", "b"],
        [None, 1],
        [torch.tensor(1), torch.tensor(2)],
        [{"a": 1}, {"b": 1}],
        [[1], [1, 2]],
        [1.0, math.nan],
    ],
)
def test_same_that_is_not(values):
    with pytest.raises(ValueError, match="test is declared the same on all workers, and is not"):
        join(values, "same", "test")


def test_local():
    assert join([1, None, "a"], "local", "test") == [1, None, "a"]
    assert join([1], "local", "test") == [1]


def test_nothing_is_guessed():
    with pytest.raises(ValueError, match=r"ran on 2 workers and does not say how their results join: declare it with"):
        join([1, 1], None, "test")
    assert join([None, None], None, "test") is None
    assert join([7], None, "test") == 7


def test_a_declaration_that_does_not_exist():
    with pytest.raises(ValueError, match="results join by one of rows, sum, same, local, got 'mean'"):
        returns("mean")
    assert declared(test_local) is None


def test_rows_in_dictionaries_tuples_and_lists_are_joined_entry_by_entry():
    parts = [
        {"tokens": torch.full((rows, width), value), "pair": (torch.full((rows,), value), [value] * rows)}
        for rows, width, value in ((1, 2, 5), (2, 3, 6))
    ]
    joined = join(parts, "rows", "test")
    assert joined["tokens"].tolist() == [[5, 5, 0], [6, 6, 6], [6, 6, 6]]
    assert joined["pair"][0].tolist() == [5, 6, 6] and joined["pair"][1] == [5, 6, 6]


@pytest.mark.parametrize(
    ("values", "alike"),
    [
        ([torch.tensor(1), 1], False),
        ([[1, 2], [1]], False),
        ([{"a": 1}, {"a": 1, "b": 2}], False),
        ([math.nan, 1.0], False),
        ([(math.nan, 1), (math.nan, 1)], True),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(2)}], True),
        ([1, 1, 2], False),
        ([None, None, 3], False),
    ],
    ids=str,
)
def test_the_same_is_the_same_in_every_entry_of_every_worker(values, alike):
    if alike:
        assert join(values, "same", "test") is values[0]
    else:
        with pytest.raises(ValueError, match="is not"):
            join(values, "same", "test")


def test_a_sum_is_of_all_workers_and_of_no_text():
    assert join([1, 2, 4], "sum", "test") == 7
    with pytest.raises(ValueError, match="declared a sum, and returns 'a'"):
        join(["a", "b"], "sum", "test")
