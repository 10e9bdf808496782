"""Packing, balancing, hypervolumes and quantised weights that can be checked by eye."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.packing.balance import _columns


def lists(arrays):
    return [array.tolist() for array in arrays]


def test_best_fit_takes_the_smallest_room_that_is_left():
    # 7 and 6 open bins of 10; 3 fits the room of 3 exactly, 4 the room of 4; 1 needs a new one.
    assert lists(rl_fn.pack([3, 7, 4, 6, 1], 10)) == [[0, 1], [2, 3], [4]]
    # Equal rooms: the first opened; a length of the capacity fills a bin.
    assert lists(rl_fn.pack([10, 6, 6, 4], 10)) == [[0], [1, 3], [2]]
    assert rl_fn.pack([], 10) == []
    assert rl_fn.pack([], 0) == [] and lists(rl_fn.pack([0, 0], 0)) == [[0, 1]]
    assert lists(rl_fn.pack([0, 10], 10)) == [[0, 1]]
    with pytest.raises(ValueError, match="a length of 11"):
        rl_fn.pack([11], 10)


def test_ids_of_a_packed_row():
    assert rl_fn.segment_ids([2, 0, 1], size=5).tolist() == [0, 0, 2, 3, 3]
    assert rl_fn.position_ids([2, 0, 1], size=5).tolist() == [0, 1, 0, 0, 1]
    assert rl_fn.segment_ids([2, 1]).tolist() == [0, 0, 1]
    assert rl_fn.position_ids([2, 1], size=3).tolist() == [0, 1, 0]
    assert rl_fn.segment_ids([1]).dtype == rl_fn.position_ids([1]).dtype == np.int32
    with pytest.raises(ValueError, match="sequences of 3 tokens"):
        rl_fn.position_ids([2, 1], size=2)


@pytest.mark.parametrize(("lengths", "message"), [([[1]], "one-dimensional"), ([1.5], "integers"), ([-1], "negative")])
def test_lengths_are_counts(lengths, message):
    for function in (rl_fn.pack, rl_fn.balance):
        with pytest.raises(ValueError, match=message):
            function(np.array(lengths), 2)


def test_zigzag_gives_every_rank_an_early_and_a_late_chunk():
    x = np.arange(8)
    assert rl_fn.zigzag_split(x, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rl_fn.zigzag_split(x, 1).tolist() == [list(range(8))]
    assert rl_fn.zigzag_gather(rl_fn.zigzag_split(x, 4)).tolist() == list(range(8))
    rows = np.stack([x, x + 10], axis=1)  # 8 × 2, tokens first
    for axis in (0, -2):
        shards = rl_fn.zigzag_split(rows, 2, axis=axis)
        assert shards[0, :, 0].tolist() == [0, 1, 6, 7] and shards.shape == (2, 4, 2)
        assert (rl_fn.zigzag_gather(shards, axis=axis) == rows).all()
    for ranks, message in ((0, "ranks must be at least 1"), (3, "zigzag needs")):
        with pytest.raises(ValueError, match=message):
            rl_fn.zigzag_split(x, ranks)
    with pytest.raises(ValueError, match="a shard is two chunks, got 3"):
        rl_fn.zigzag_gather(np.zeros((2, 3)))


def test_balance_is_even_where_it_can_be():
    parts = rl_fn.balance([5, 4, 3, 3, 3], 2)  # 5 + 4 and 3 + 3 + 3: longest first alone gives 10 and 8
    assert sorted(sum([5, 4, 3, 3, 3][i] for i in part) for part in parts) == [9, 9]
    parts = rl_fn.balance([8, 7, 6, 5, 4, 2], 3, equal_size=True)
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(sum([8, 7, 6, 5, 4, 2][i] for i in part) for part in parts) == [10, 11, 11]
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))
    assert lists(rl_fn.balance([], 2)) == [[], []]
    assert lists(rl_fn.balance([3, 1], 1)) == [[0, 1]]
    with pytest.raises(ValueError, match="parts must be at least 1"):
        rl_fn.balance([1], 0)
    with pytest.raises(ValueError, match="equal_size needs"):
        rl_fn.balance([1, 2, 3], 2, equal_size=True)


def test_columns_to_exchange_are_all_or_evenly_spaced():
    assert _columns(3, 1).tolist() == [0, 1, 2]
    # 2¹⁷/64 pairs leave √2048 = 45 columns; never less than both ends.
    spaced = _columns(1000, 64)
    assert (spaced.size, spaced[0], spaced[-1]) == (45, 0, 999)
    assert _columns(5, 10**9).tolist() == [0, 4]
    assert _columns(5, 0).tolist() == [0, 1, 2, 3, 4]


def test_balance_where_most_parts_are_too_heavy():
    lengths = np.array([8, 10, 8, 8, 5, 10, 2, 7, 8, 10, 6, 5])
    assert sorted(int(lengths[part].sum()) for part in rl_fn.balance(lengths, 4)) == [21, 22, 22, 22]


def test_the_same_lengths_are_cut_in_the_same_way():
    """Which of several equal partitions it is depends on the order of the search: a change of it changes a run."""
    lengths = [89, 75, 16, 96, 14, 94, 12, 98, 7, 88, 53, 56, 16, 13, 80, 24, 2, 45, 37, 45, 47]
    expected = [[7, 12, 16, 19], [9, 17, 18], [5, 15, 20], [0, 2, 6, 10], [3, 4, 8, 11], [1, 13, 14]]
    assert lists(rl_fn.balance(lengths, 6)) == expected


def test_balance_of_lengths_beyond_32_bits():
    lengths = np.array([5, 4, 3, 3, 3]) * 2**29
    assert sorted(int(lengths[part].sum()) for part in rl_fn.balance(lengths, 2)) == [9 * 2**29] * 2


def test_hypervolumes_of_boxes():
    # Two boxes of 2 overlapping in 1; the third point adds nothing, one on the border neither.
    points = np.array([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0], [0.0, 9.0]])
    assert rl_fn.hypervolume(points, [0.0, 0.0], maximize=True) == 3.0
    assert rl_fn.hypervolume(-points, [0.0, 0.0], maximize=False) == 3.0
    assert rl_fn.hypervolume(points * [1.0, -1.0], [0.0, 0.0], maximize=[True, False]) == 3.0
    assert rl_fn.hypervolume_contribution(points, [0.0, 0.0], maximize=True).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert rl_fn.hypervolume(np.zeros((0, 2)), [0.0, 0.0], maximize=True) == 0.0
    assert rl_fn.hypervolume(np.array([[3.0], [2.0]]), [1.0], maximize=True) == 2.0
    # Three bars of 2 through the unit cube: 3 · 2 − 3 + 1 = 4.
    bars = np.array([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]])
    assert rl_fn.hypervolume(bars, [0.0] * 3, maximize=True) == 4.0
    assert rl_fn.hypervolume_contribution(bars, [0.0] * 3, maximize=True).tolist() == [1.0, 1.0, 1.0]
    assert rl_fn.hypervolume(np.concatenate([bars, bars]), [0.0] * 3, maximize=True) == 4.0


def test_int8_codes():
    q = rl_fn.quantize_int8(jnp.array([[127.5, -127.5, 1.0], [0.0, 0.0, 0.0]]))
    # Scale 1: 127.5 is clipped to 127, −127.5 rounds to even, −128; a row of zeros has the smallest scale.
    assert q.values.tolist() == [[127, -128, 1], [0, 0, 0]]
    assert q.scale.tolist() == [[1.0], [float(np.finfo(np.float32).eps)]]
    q = rl_fn.quantize_int8(jnp.array([[254.0, -254.0]]), half_range=127)
    assert q.values.tolist() == [[127, -127]] and q.scale.tolist() == [[2.0]]
    assert rl_fn.quantize_int8(jnp.array([[1.0, 2.0], [4.0, 127.5]]), axis=None).scale.tolist() == [[1.0]]
    assert rl_fn.dequantize(q.values, q.scale).tolist() == [[254.0, -254.0]]
    bad = rl_fn.quantize_int8(jnp.array([[math.inf, 1.0], [1.0, 127.5]]))
    assert bad.values.tolist() == [[0, 0], [1, 127]]
    assert math.isnan(bad.scale[0, 0]) and float(bad.scale[1, 0]) == 1.0


def test_fp8_blocks():
    w = jnp.array([[448.0, 1.0, 896.0], [-448.0, 2.0, 8.0], [4.48, 0.0, 1.0]])
    q = rl_fn.quantize_fp8(w, granularity="block", block=2)
    # Largest of the blocks 448, 896, 4.48, 1, over 448.
    np.testing.assert_allclose(q.scale, [[1.0, 2.0], [0.01, 1 / 448]], rtol=1e-6)
    assert q.values.astype(jnp.float32).tolist() == [[448.0, 1.0, 448.0], [-448.0, 2.0, 4.0], [448.0, 0.0, 448.0]]
    np.testing.assert_allclose(rl_fn.dequantize(q.values, q.scale, block=2), w, rtol=1e-6)
    for granularity, scale in (("channel", [[2.0], [1.0], [0.01]]), ("tensor", [[2.0]])):
        np.testing.assert_allclose(rl_fn.quantize_fp8(w, granularity=granularity).scale, scale, rtol=1e-6)
    # A stack of matrices: each its own blocks.
    many = rl_fn.quantize_fp8(jnp.stack([w, 2 * w]), granularity="block", block=2)
    np.testing.assert_allclose(many.scale, jnp.stack([q.scale, 2 * q.scale]), rtol=1e-6)
    assert many.values.astype(jnp.float32).tolist() == [q.values.astype(jnp.float32).tolist()] * 2
    np.testing.assert_allclose(rl_fn.dequantize(many.values, many.scale, block=2), jnp.stack([w, 2 * w]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"scale must have shape \(2, 2\)"):
        rl_fn.dequantize(q.values, q.scale[:1], block=2)
    with pytest.raises(ValueError, match="does not belong"):
        rl_fn.dequantize(q.values, q.scale)
    with pytest.raises(ValueError, match="does not belong"):
        rl_fn.dequantize(q.values, q.scale[0, :1])


def test_blocks_of_a_stack_that_are_not_square():
    q = rl_fn.quantize_fp8(jnp.ones((2, 3, 5)), granularity="block", block=2)
    assert q.scale.shape == (2, 2, 3) and q.values.shape == (2, 3, 5)
    np.testing.assert_allclose(rl_fn.dequantize(q.values, q.scale, block=2), jnp.ones((2, 3, 5)), rtol=1e-6)


def test_smooth_scales_divide_the_range():
    # √16/√4 and 1 where a channel or its weights are unused.
    got = rl_fn.smooth_scales(jnp.array([16.0, 0.0, 4.0]), jnp.array([[4.0, 1.0, 0.0], [-2.0, 1.0, 0.0]]))
    np.testing.assert_allclose(got, [2.0, 1.0, 1.0], rtol=1e-6)
    got = rl_fn.smooth_scales(jnp.array([16.0]), jnp.array([[4.0]]), alpha=1.0)
    np.testing.assert_allclose(got, [16.0], rtol=1e-6)
