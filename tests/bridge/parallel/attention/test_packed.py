"""Packed documents on one rank: each document's own attention, exactly apart from the others."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from rl_bridge.parallel.attention import AttentionPlan, packed, ring
from rl_bridge.parallel.attention.packed import length_classes
from rl_bridge.parallel.attention.plan import segments_of
from tests.bridge.parallel.attention import broken_plans, pairs, reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SCALE = 0.3
# Alike and in place, alike and apart, one class of different lengths, several classes, one token, long ones.
PACKINGS = [[5, 5, 5], [40, 5, 40], [7, 9, 8, 10], [3, 60, 1, 14, 90, 2, 41], [1], [1, 1], [530, 2, 600]]


def attend(segments, q, k, v):
    return AttentionPlan(segments, q.device).attend(q, k, v, SCALE)


def packed_and_wanted(segments, dtype, device="cpu", heads=(4, 2)):
    q, k, v, grad = reference.tensors(segments[-1].stop, heads=heads, dtype=dtype, device=device)
    got = reference.with_gradients(lambda *x: attend(segments, *x), q, k, v, grad)
    mask = pairs.mask(segments).to(device)
    wide = [x.double() for x in (q, k, v)]
    want = reference.with_gradients(lambda *x: reference.attention(*x, mask, SCALE)[0], *wide, grad)
    return got, want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_packed_attention_is_that_of_each_document(lengths, dtype, device):
    got, want = packed_and_wanted(segments_of(lengths), dtype, device)
    largest = max(x.abs().max() for x in want)
    assert max((a - b).abs().max() for a, b in zip(got, want, strict=True)) < TOLERANCE[dtype] * largest


@given(segments=pairs.segments(), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_segments_that_continue_others_see_them(segments, heads):
    got, want = packed_and_wanted(segments, torch.float64, heads=heads)
    assert max((a - b).abs().max() for a, b in zip(got, want, strict=True)) < 1e-12


@pytest.mark.parametrize("broken", ["no_documents", "squares_alone", "shifted_documents"])
def test_a_wrong_plan_is_seen(broken, monkeypatch):
    monkeypatch.setattr(ring, "rank_plan", getattr(broken_plans, broken))
    got, want = packed_and_wanted(segments_of([6, 9, 4, 7], [None, None, 1, None]), torch.float32)
    assert reference.distance(got[:1], want[:1]) > 1e-2


def test_gradients_are_derivatives():
    segments = segments_of([3, 2, 4], [None, 0, None])
    q, k, v, _ = reference.tensors(9, heads=(2, 1), dim=4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.gradcheck(lambda *x: attend(segments, *x), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("lengths", PACKINGS[1:4], ids=str)
def test_what_is_in_a_document_changes_no_bit_of_the_others(lengths, value, dtype):
    segments = segments_of(lengths)
    arrays = reference.tensors(segments[-1].stop, dtype=dtype)
    before = reference.with_gradients(lambda *x: attend(segments, *x), *arrays)
    first, stop, _ = segments[1]
    others = torch.ones(segments[-1].stop, dtype=torch.bool)
    others[first:stop] = False
    changed = [x.clone() for x in arrays]
    for x in changed:
        x[first:stop] += value
    after = reference.with_gradients(lambda *x: attend(segments, *x), *changed)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a[~others], b[~others]) for a, b in zip(before, after, strict=True))


@given(lengths=st.lists(st.integers(1, 3000), max_size=60), wider=st.sampled_from([1.0, 1.15, 2.0]))
def test_documents_share_a_call_with_documents_of_about_their_length(lengths, wider):
    classes = length_classes(lengths, wider, limit=512)
    assert sorted(number for members in classes for number in members) == list(range(len(lengths)))
    sizes = [[lengths[number] for number in members] for members in classes]
    for members in sizes:
        assert members[0] == max(members) <= wider * min(members)
        assert members[0] <= 512 or len(set(members)) == 1
    # Neighbouring classes could not have been one.
    for longer, shorter in itertools.pairwise(sizes):
        assert longer[0] > shorter[0] and (longer[0] > wider * shorter[0] or longer[0] > 512)


def test_many_short_documents_are_few_calls(monkeypatch):
    lengths = torch.randint(8, 24, (768,), generator=torch.Generator().manual_seed(0)).tolist()
    calls = []
    forward = ring.blocks.forward
    monkeypatch.setattr(ring.blocks, "forward", lambda *x, **y: calls.append(x[0].shape) or forward(*x, **y))
    segments = segments_of(lengths)
    attend(segments, *reference.tensors(segments[-1].stop, heads=(1, 1))[:3])
    assert len(calls) <= 8
    assert sum(shape[0] * shape[2] for shape in calls) < 1.1 * sum(lengths)


def test_the_backward_pass_keeps_the_tokens_and_a_logsumexp():
    segments = segments_of([100, 300, 7, 9])
    q, k, v, _ = reference.tensors(416, heads=(4, 2), dim=8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        attend(segments, q.requires_grad_(), k, v)
    assert sum(kept) == 4 * 416 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 4)


def test_cuda_takes_all_documents_in_one_call(monkeypatch):
    # Shapes, dtypes and signatures, on tensors without values: also where there is no GPU.
    monkeypatch.setattr(ring.blocks, "operation", lambda q, v: "cuda_flash")
    calls = []
    monkeypatch.setattr(packed, "varlen_attn", lambda *x, **y: calls.append((x, y)) or varlen_attn(*x, **y))
    q, k, v, grad = reference.tensors(24, dtype=torch.bfloat16, device="meta")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = AttentionPlan(segments_of([5, 12, 7]), torch.device("cpu")).attend(*inputs, SCALE)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    gradients = torch.autograd.grad(out, inputs, grad)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    [((*_, edges, same, longest, same_longest), options)] = calls
    assert edges.tolist() == same.tolist() == [0, 5, 17, 24]
    assert (edges.dtype, longest, same_longest) == (torch.int32, 12, 12)
    assert options == {"window_size": (-1, 0), "scale": SCALE, "enable_gqa": True}
