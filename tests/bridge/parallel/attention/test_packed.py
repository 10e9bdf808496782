"""Packed documents on one rank: each document's own attention, exactly apart from the others."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from rl_bridge.parallel.attention import AttentionPlan, rectangles, ring
from rl_bridge.parallel.attention.plan import segments_of
from rl_bridge.parallel.documents import Documents
from tests.bridge.parallel.attention import broken_plans, pairs, reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SCALE = 0.3
# Of one length, of one length but apart, all different, of one token, and long ones.
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


def test_second_derivatives_are_refused():
    q, k, v, grad = (x.requires_grad_() for x in reference.tensors(5))
    first = torch.autograd.grad(attend(segments_of([5]), q, k, v), q, grad, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


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


@given(segments=pairs.segments(prefixes=False))
def test_neighbours_of_one_length_are_one_run(segments):
    spans = [rectangles.Span(segment.start, segment.stop) for segment in segments]
    runs = rectangles.runs_of(spans)
    again = [(r.start + i * r.length, r.start + (i + 1) * r.length) for r in runs for i in range(r.documents)]
    assert again == spans
    assert all(a.length != b.length for a, b in itertools.pairwise(runs))


def test_many_short_documents_are_few_calls(monkeypatch):
    lengths = torch.randint(8, 24, (768,), generator=torch.Generator().manual_seed(0)).tolist()
    calls = []
    forward = rectangles.blocks.forward
    monkeypatch.setattr(rectangles.blocks, "forward", lambda *x, **y: calls.append(x[0].shape) or forward(*x, **y))
    documents = Documents(lengths)
    documents.plan.attend(*reference.tensors(documents.tokens, heads=(1, 1))[:3], SCALE)
    assert sorted(shape[2] for shape in calls) == list(range(8, 24))
    assert sum(shape[0] * shape[2] for shape in calls) == sum(lengths)


def test_the_backward_pass_keeps_the_tokens_and_a_logsumexp():
    segments = segments_of([100, 300, 7, 9])
    q, k, v, _ = reference.tensors(416, heads=(4, 2), dim=8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        attend(segments, q.requires_grad_(), k, v)
    assert sum(kept) == 4 * 416 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 4)


@pytest.mark.parametrize("window, before", [(None, -1), (12, -1), (11, 10), (1, 0)])
def test_cuda_takes_all_documents_in_one_call(window, before, monkeypatch):
    # Shapes, dtypes and signatures, on tensors without values: also where there is no GPU.
    monkeypatch.setattr(rectangles.blocks, "operation", lambda q, v: "cuda_flash")
    calls = []
    monkeypatch.setattr(rectangles, "varlen_attn", lambda *x, **y: calls.append((x, y)) or varlen_attn(*x, **y))
    q, k, v, grad = reference.tensors(24, dtype=torch.bfloat16, device="meta")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = AttentionPlan(segments_of([5, 12, 7]), torch.device("cpu")).attend(*inputs, SCALE, window=window)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    gradients = torch.autograd.grad(out, inputs, grad)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    [((*_, edges, same, longest, same_longest), options)] = calls
    assert edges.tolist() == same.tolist() == [0, 5, 17, 24]
    assert (edges.dtype, longest, same_longest) == (torch.int32, 12, 12)
    assert options == {"window_size": (before, 0), "scale": SCALE, "enable_gqa": True}
