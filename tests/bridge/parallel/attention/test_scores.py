"""Windows, soft caps and sinks are attention by its definition, by a plan and without one (ENG-4, ENG-16, MUSA-5)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.parallel.attention import AttentionPlan, blocks, exact, rectangles, ring
from rl_bridge.parallel.attention import blocks as plain
from rl_bridge.parallel.attention.plan import segments_of
from tests.bridge.parallel.attention import broken_plans, pairs, reference

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 4e-6, torch.bfloat16: 3e-2}
WINDOWS = st.none() | st.integers(1, 12)
CAPS = st.none() | st.floats(0.5, 30.0)
# Queries, keys; the widths of keys and of values.
HEADS = st.sampled_from([(2, 2), (4, 2), (3, 1)])
WIDTHS = st.sampled_from([(8, 8), (4, 6), (6, 4)])


def sinks_of(heads, dtype=torch.float64):
    return torch.randn(heads, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def attended_and_wanted(segments, dtype, window, softcap, sinks, heads=(4, 2), widths=(8, 8)):
    """Output and gradients, of the sinks too, by a plan and by the definition."""
    q, k, v, grad = reference.tensors(segments[-1].stop, heads, widths[0], dtype=dtype, value_dim=widths[1])
    inputs = [q, k, v, *([sinks_of(heads[0], dtype)] if sinks else [])]

    def by_plan(q, k, v, sinks=None):
        plan = AttentionPlan(segments, q.device)
        return plan.attend(q, k, v, SCALE, window=window, softcap=softcap, sinks=sinks)

    def by_definition(q, k, v, sinks=None):
        return reference.attention(q, k, v, pairs.mask(segments, window), SCALE, softcap, sinks)[0]

    got = reference.with_gradients(by_plan, *inputs, grad)
    return got, reference.with_gradients(by_definition, *(x.double() for x in inputs), grad)


def largest_difference(got, want):
    """As a part of the largest number."""
    assert len(got) == len(want) and all(torch.isfinite(x).all() for x in got)
    largest = max(x.abs().max() for x in want)
    return max((a - b).abs().max() for a, b in zip(got, want, strict=True)) / largest


@given(segments=pairs.segments(), window=WINDOWS, softcap=CAPS, sinks=st.booleans(), heads=HEADS, widths=WIDTHS)
def test_a_plan_is_attention_by_its_definition(segments, window, softcap, sinks, heads, widths):
    got, want = attended_and_wanted(segments, torch.float64, window, softcap, sinks, heads, widths)
    assert largest_difference(got, want) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window, softcap", [(None, None), (7, None), (7, 5.0), (64, None), (1, 2.0)])
def test_long_documents_in_every_dtype(window, softcap, sinks, dtype):
    segments = segments_of([200, 7, 64, 30, 150, 65, 3], [None, None, None, 0, 0, 2, 5])
    got, want = attended_and_wanted(segments, dtype, window, softcap, sinks)
    assert largest_difference(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("broken", broken_plans.WINDOWED)
def test_a_wrong_window_is_seen(broken, monkeypatch):
    monkeypatch.setattr(ring, "rank_plan", getattr(broken_plans, broken))
    got, want = attended_and_wanted(segments_of([9, 12, 4], [None, None, 1]), torch.float64, 5, None, True)
    assert largest_difference(got, want) > 1e-2


def test_gradients_are_derivatives():
    segments = segments_of([5, 3, 6], [None, 0, None])
    inputs = [*reference.tensors(14, heads=(2, 1), dim=4, dtype=torch.float64)[:3], sinks_of(2)]

    def attend(q, k, v, sinks):
        return AttentionPlan(segments, q.device).attend(q, k, v, SCALE, window=4, softcap=2.0, sinks=sinks)

    torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("window", [90, 1000])
def test_a_window_that_does_not_bite_changes_no_bit(window):
    segments = segments_of([60, 30, 41], [None, 0, None])
    arrays = reference.tensors(131)
    plan = AttentionPlan(segments, torch.device("cpu"))
    without = reference.with_gradients(lambda *x: plan.attend(*x, SCALE), *arrays)
    within = reference.with_gradients(lambda *x: plan.attend(*x, SCALE, window=window), *arrays)
    assert all(torch.equal(a, b) for a, b in zip(within, without, strict=True))


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_what_is_in_a_document_changes_no_bit_of_the_others(value):
    segments = segments_of([30, 41, 41, 12, 50], [None, None, None, 2, None])
    *arrays, grad = reference.tensors(segments[-1].stop)

    def attend(q, k, v):
        plan = AttentionPlan(segments, q.device)
        return plan.attend(q, k, v, SCALE, window=9, sinks=sinks_of(4, torch.float32))

    before = reference.with_gradients(attend, *arrays, grad)
    first, stop, _ = segments[1]
    others = torch.ones(segments[-1].stop, dtype=torch.bool)
    others[first:stop] = False
    changed = [x.clone() for x in (*arrays, grad)]
    for x in changed:
        x[first:stop] += value
    after = reference.with_gradients(attend, *changed)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(before, after, strict=True))


def test_windows_are_few_calls_and_no_masks(monkeypatch):
    calls = []
    forward = rectangles.blocks.forward
    monkeypatch.setattr(rectangles.blocks, "forward", lambda *x, **y: calls.append((x[0].shape, y)) or forward(*x, **y))
    plan = AttentionPlan(segments_of([640, 640, 640]), torch.device("cpu"))
    plan.attend(*reference.tensors(1920, heads=(1, 1))[:3], SCALE, window=64)
    assert [(tuple(shape), options["causal"]) for shape, options in calls] == [
        ((30, 1, 64, 8), True),
        ((27, 1, 63, 8), True),
    ]


@st.composite
def masked(draw):
    """Queries, keys and a mask: none, one of rules, one with queries that see nothing, or one that is added."""
    kind = draw(st.sampled_from(["causal", "none", "rows", "dead", "heads", "added"]))
    queries = draw(st.integers(1, 9))
    keys = queries if kind == "causal" else draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.rand(2, 4 if kind == "heads" else 1, queries, keys, generator=generator) < 0.6
    if kind not in ("dead", "none", "causal"):
        mask[..., 0] = True
    if kind == "added":
        return queries, keys, torch.where(mask, 0.5, -1e30).double(), False
    return queries, keys, None if kind in ("causal", "none") else mask, kind == "causal"


@pytest.mark.parametrize("chunk", [1 << 20, 20])
@given(data=masked(), softcap=CAPS, sinks=st.booleans(), heads=HEADS, widths=WIDTHS)
def test_without_a_plan_it_is_attention_by_its_definition(data, softcap, sinks, heads, widths, chunk):
    queries, keys, mask, causal = data
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, : heads[0]]
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads[0], queries, widths[0]), (heads[1], keys, widths[0]), (heads[1], keys, widths[1])]
    inputs = [torch.randn((2, *shape), generator=generator, dtype=torch.float64) for shape in shapes]
    grad = torch.randn((2, heads[0], queries, widths[1]), generator=generator, dtype=torch.float64)
    options = {"scale": SCALE, "softcap": softcap}

    def computed(q, k, v, of_heads=None):
        return plain.plain_attention(q, k, v, mask, causal=causal, sinks=of_heads, **options)

    def wanted(q, k, v, of_heads=None):
        scores = SCALE * q @ k.repeat_interleave(heads[0] // heads[1], 1).mT
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if causal:
            scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), float("-inf"))
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        if of_heads is not None:
            scores = torch.cat([scores, of_heads[:, None, None].expand(2, -1, queries, 1)], -1)
        # A query that sees nothing has output 0.
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        probabilities = scores.masked_fill(nothing, 0.0).softmax(-1)[..., :keys].masked_fill(nothing, 0.0)
        return probabilities @ v.repeat_interleave(heads[0] // heads[1], 1)

    if sinks:
        inputs.append(sinks_of(heads[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MOST_SCORES", chunk)
        got = reference.with_gradients(computed, *inputs, grad)
    want = reference.with_gradients(wanted, *inputs, grad)
    assert all((a - b).abs().max() < 1e-10 * max(1.0, b.abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_parts_of_a_causal_row_see_their_part_of_any_mask(batch, shape, dtype, monkeypatch):
    """A mask may have one row or one key for all; parts have fewer keys than the row."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(batch, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(batch, 1, *shape, generator=generator, dtype=torch.float64)
    mask = mask > 0.3 if dtype == torch.bool else mask
    options = {"causal": True, "mask": mask, "scale": SCALE, "softcap": 5.0}
    whole = exact.forward(q, k, v, **options)
    monkeypatch.setattr(exact, "MOST_SCORES", 1)
    parts = exact.forward(q, k, v, **options)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True) for a, b in zip(whole, parts, strict=True))
    assert whole[0][:, :, -1].isfinite().all() or dtype == torch.bool


@pytest.mark.long
def test_a_long_row_is_computed_in_parts():
    # Never [T, T]: of 8 heads and 4096 tokens the scores alone are 512 MiB.
    q, k, v, grad = reference.tensors(4096, heads=(8, 2))
    most = []
    scores = exact._scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_scores", lambda *x: most.append(x[0].shape[2]) or scores(*x))
        plan = AttentionPlan(segments_of([4096]), q.device)
        reference.with_gradients(lambda *x: plan.attend(*x, SCALE, softcap=20.0), q, k, v, grad)
    assert max(most) * 8 * 4096 <= exact.MOST_SCORES


def test_a_soft_cap_takes_matrix_products_and_sinks_the_fastest_operation(monkeypatch):
    calls = []
    forward = exact.forward
    monkeypatch.setattr(blocks.exact, "forward", lambda *x, **y: calls.append(y["softcap"]) or forward(*x, **y))
    q, k, v, _ = (x.transpose(0, 1)[None] for x in reference.tensors(5))
    options = {"causal": True, "scale": SCALE}
    plain.plain_attention(q, k, v, None, **options, softcap=None, sinks=sinks_of(4, torch.float32))
    assert not calls
    plain.plain_attention(q, k, v, None, **options, softcap=3.0, sinks=None)
    assert calls == [3.0]
