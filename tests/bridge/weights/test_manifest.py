"""Which rectangle of a tensor a rank holds, against torch's own cutting."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from rl_bridge.weights.manifest import (
    Claim,
    Frame,
    SourceFailed,
    TensorSpec,
    inside,
    overlap,
    placed_part,
    plan_buckets,
    volume,
    whole,
)

PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate()])


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 7)),
    mesh=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    placements=st.tuples(PLACEMENTS, PLACEMENTS),
    data=st.data(),
)
def test_a_part_is_what_torch_cuts(shape, mesh, placements, data):
    at = [data.draw(st.integers(0, size - 1)) for size in mesh]
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, at, placements)
    part = placed_part(shape, mesh, at, placements)
    assert tuple(length for _, length in part) == sizes
    if volume(part):
        assert tuple(start for start, _ in part) == offsets


@pytest.mark.parametrize("rows", range(1, 26))
@pytest.mark.parametrize(("shards", "tensors"), [(2, 2), (3, 2), (2, 3)])
def test_fsdp_over_tensor_parallelism_cuts_the_tensor_parallel_shard(rows, shards, tensors):
    """Where rows do not split evenly, torch's placements may say something else than FSDP2 does: then it is refused."""
    values = torch.arange(rows)
    placements = [_StridedShard(0, split_factor=tensors), Shard(0)]
    for j, i in product(range(tensors), range(shards)):
        chunk = chunk_of(values, tensors, j)
        wanted = chunk_of(chunk, shards, i)
        try:
            [(start, length)] = placed_part([rows], [shards, tensors], [i, j], placements)
        except NotImplementedError:
            assert rows % (shards * tensors)
            continue
        if length != len(wanted):
            assert rows % (shards * tensors)  # the local shape gives it away
        else:
            assert values[start : start + length].tolist() == wanted.tolist()


def chunk_of(values, count, number):
    size = -(-len(values) // count)
    return values[number * size : (number + 1) * size]


def test_what_is_no_rectangle_or_no_weight_is_refused():
    with pytest.raises(NotImplementedError, match="no single rectangle"):
        placed_part([8], [2], [0], [_StridedShard(0, split_factor=2)])
    with pytest.raises(NotImplementedError, match="only shards and copies travel"):
        placed_part([8], [2], [0], [Partial()])


@given(data=st.data())
def test_overlaps_are_what_both_hold(data):
    axis = st.tuples(st.integers(0, 6), st.integers(0, 5))
    one, other = (data.draw(st.tuples(axis, axis)) for _ in range(2))
    marks = torch.zeros(12, 12)
    inside(marks, whole(marks.shape), one).add_(1)
    inside(marks, whole(marks.shape), other).add_(1)
    both = overlap(one, other)
    assert volume(both) == int((marks == 2).sum())
    if volume(both):
        assert bool((inside(marks, whole(marks.shape), both) == 2).all())


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    limit=st.integers(1, 200),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), min_size=12, max_size=12),
)
def test_buckets_hold_all_tensors_in_order_within_their_limit(sizes, limit, dtypes):
    tensors = [(f"w{i}", TensorSpec((n,), dtype), i) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=False))]
    buckets = plan_buckets(tensors, limit)
    assert [(e.name, e.spec, e.origin) for b in buckets for e in b.entries] == tensors
    assert [b.number for b in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        ends = [e.offset + e.spec.nbytes for e in bucket.entries]
        assert len(bucket.entries) == 1 or max(ends) <= limit
        assert all(e.offset >= end for e, end in zip(bucket.entries[1:], ends, strict=False))
    largest = max(Frame.nbytes(bucket, 2) for bucket in buckets)
    buffer = torch.full((largest,), 0xFF, dtype=torch.uint8)
    for bucket in buckets:
        frame = Frame(buffer, bucket, 2)
        for entry in bucket.entries:
            frame.tensor(entry).fill_(entry.origin)
        claims = {i: Claim(whole(e.spec.shape), -e.origin) for i, e in enumerate(bucket.entries)}
        frame.claim(0, claims, failed=False)
        frame.claim(1, {}, failed=False)
        assert frame.claims() == [[claim] for claim in claims.values()]
        assert all(bool((frame.tensor(e) == e.origin).all()) for e in bucket.entries)


def test_a_failed_writer_and_another_bucket_s_bytes_are_seen():
    buckets = plan_buckets([("a", TensorSpec((4,), torch.float32), 0), ("b", TensorSpec((4,), torch.float32), 1)], 8)
    buffer = torch.zeros(max(Frame.nbytes(bucket, 2) for bucket in buckets), dtype=torch.uint8)
    Frame(buffer, buckets[0], 2).claim(0, {}, failed=False)
    Frame(buffer, buckets[0], 2).claim(1, {}, failed=True)
    with pytest.raises(SourceFailed, match="member 1 failed at bucket 0"):
        Frame(buffer, buckets[0], 2).claims()
    Frame(buffer, buckets[0], 2).claim(1, {}, failed=False)
    with pytest.raises(ValueError, match="bucket 1 was damaged on the way: it says that it is 0"):
        Frame(buffer, buckets[1], 2).claims()
