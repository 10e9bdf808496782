"""Balance, bins, zigzag shards and ids: promises that hold for any lengths, and the quality at full size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.oracle.lookup import ORACLE

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def heavy_tailed(name: str, count: int = 8192) -> np.ndarray:
    rng = np.random.default_rng(0)
    match name:
        case "lognormal":
            return np.clip(rng.lognormal(6.5, 1.0, count), 16, 16384).astype(np.int64)
        case "pareto":
            return np.clip(200 * (rng.pareto(1.5, count) + 1), 1, 8192).astype(np.int64)
        case _:
            return np.where(rng.random(count) < 0.1, rng.integers(6000, 8193, count), rng.integers(100, 1500, count))


def loads(lengths, parts):
    return np.array([np.asarray(lengths)[part].sum() for part in parts])


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("name", ["lognormal", "pareto", "bimodal"])
def test_512_parts_of_8192_are_within_half_a_percent(name, equal_size):
    lengths = heavy_tailed(name)
    parts = rl_fn.balance(lengths, 512, equal_size=equal_size)
    got = loads(lengths, parts)
    lowest = max(got.mean(), lengths.max())
    if equal_size:
        assert {part.size for part in parts} == {16}
        # The m longest items need company, at best the 15 m shortest.
        m = np.arange(1, 513)
        long, short = np.cumsum(np.sort(lengths)[::-1]), np.cumsum(np.sort(lengths))
        lowest = max(lowest, ((long[m - 1] + short[15 * m - 1]) / m).max())
    assert got.max() / lowest <= 1.005


@given(lengths=LENGTHS, parts=st.integers(1, 12))
def test_balance_is_a_partition_within_grahams_bound(lengths, parts):
    cut = rl_fn.balance(lengths, parts)
    assert len(cut) == parts
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in cut)
    if lengths:
        longest = sorted(lengths, reverse=True)
        # No partition beats these; with more items than parts, two of the parts + 1 longest share one.
        pair = longest[parts - 1] + longest[parts] if len(longest) > parts else 0
        lowest = max(sum(lengths) / parts, longest[0], pair)
        # Graham: before the heaviest part's last item it held at most the mean, and that item is at most half a pair.
        assert loads(lengths, cut).max() <= 1.5 * lowest


@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 6), size=st.integers(0, 6))
def test_equal_size_is_a_partition_into_equal_sizes(seed, parts, size):
    lengths = np.random.default_rng(seed).integers(0, 30, parts * size)
    cut = rl_fn.balance(lengths, parts, equal_size=True)
    assert [part.size for part in cut] == [size] * parts
    assert sorted(np.concatenate(cut).tolist()) == list(range(parts * size))


@pytest.mark.parametrize(
    ("lengths", "parts", "optimum"), [([7, 7, 6, 6, 5, 5, 4, 4, 4], 4, 12), ([3, 3, 2, 2, 2], 2, 6)]
)
def test_swaps_reach_the_optimum_where_longest_first_alone_does_not(lengths, parts, optimum):
    # Graham's worst cases: LPT ends at 15 and at 7.
    assert loads(lengths, rl_fn.balance(lengths, parts)).tolist() == [optimum] * parts


@given(lengths=LENGTHS, capacity=st.integers(50, 80))
def test_bins_hold_everything_and_never_too_much(lengths, capacity):
    bins = rl_fn.pack(lengths, capacity)
    assert sorted(i for items in bins for i in items.tolist()) == list(range(len(lengths)))
    assert all(items.size for items in bins)
    filled = loads(lengths, bins)
    assert (filled <= capacity).all()
    # Any two bins together overflow one: else the later one's items would have gone into the earlier.
    assert (np.sort(filled)[:2].sum() > capacity) or len(bins) < 2


def test_best_fit_finds_the_full_bins():
    lengths = [6, 4, 7, 3, 5, 5, 9, 1]
    assert loads(lengths, rl_fn.pack(lengths, 10)).tolist() == [10, 10, 10, 10]


@given(lengths=st.lists(st.integers(0, 6), max_size=8), extra=st.integers(0, 5))
def test_ids_are_those_of_plain_lists(lengths, extra):
    size = sum(lengths) + extra
    segments, positions = rl_fn.segment_ids(lengths, size=size), rl_fn.position_ids(lengths, size=size)
    assert segments.dtype == positions.dtype == np.int32
    assert segments.tolist() == ORACLE["segment_ids"](lengths, size=size)
    assert positions.tolist() == ORACLE["position_ids"](lengths, size=size)
    assert rl_fn.segment_ids(lengths).tolist() == segments[: sum(lengths)].tolist()
    assert rl_fn.position_ids(lengths).tolist() == positions[: sum(lengths)].tolist()


@given(ranks=st.integers(1, 6), chunk=st.integers(1, 5), axis=st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_zigzag_gather_is_the_inverse(ranks, chunk, axis):
    shape = [2, 2, 3]
    shape[axis] = 2 * ranks * chunk
    x = np.random.default_rng(0).normal(size=shape)
    shards = rl_fn.zigzag_split(x, ranks, axis=axis)
    assert shards.shape[0] == ranks
    np.testing.assert_array_equal(rl_fn.zigzag_gather(shards, axis=axis), x)
    tokens = np.arange(2 * ranks * chunk)
    assert rl_fn.zigzag_split(tokens, ranks).tolist() == ORACLE["zigzag_split"](tokens.tolist(), ranks)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zigzag_balances_causal_attention(ranks):
    work = np.arange(1, 8192 + 1)
    zigzag = rl_fn.zigzag_split(work, ranks).sum(axis=1)
    assert zigzag.max() / zigzag.mean() <= 1.01
    assert work.reshape(ranks, -1).sum(axis=1).max() / zigzag.mean() > 1.4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.balance([1, -2], 2), "-2"),
        (lambda: rl_fn.balance(np.array([1.5, 2.0]), 2), "float64"),
        (lambda: rl_fn.balance([1, 2], 0), "at least 1"),
        (lambda: rl_fn.balance([1, 2, 3], 2, equal_size=True), "3 in 2"),
        (lambda: rl_fn.balance(np.ones((2, 2), np.int64), 2), "one-dimensional"),
        (lambda: rl_fn.pack([3, 11], 10), "11"),
        (lambda: rl_fn.segment_ids([3, 4], size=6), "7"),
        (lambda: rl_fn.zigzag_split(np.arange(6), 2), "6"),
        (lambda: rl_fn.zigzag_split(np.arange(6), 0), "at least 1"),
        (lambda: rl_fn.zigzag_gather(np.zeros((2, 3))), "3"),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
