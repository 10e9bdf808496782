"""Zigzag ring attention over processes: the numbers of one process, forward and backward."""

import functools

import numpy as np
import pytest
import torch

from rl_bridge.parallel.attention.plan import held
from tests.bridge.parallel.attention import broken_plans, pairs, reference
from tests.bridge.parallel.attention.ring_ranks import (
    CHANGED,
    LENGTHS,
    MODELS,
    PACKINGS,
    SCALE,
    SCORES,
    SPOILED,
    TOLERANCE,
    changed_batch,
    numpy,
    rank,
    segments,
    sinks,
)
from tests.support.attending_models import tiny
from tests.support.ranks import results


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """What every rank computed."""
    count = request.param
    messages = results(functools.partial(rank, ranks=count), count, tmp_path_factory.mktemp("gloo"))
    assert not [found for _, found in messages if isinstance(found, str)]
    return [found for _, found in messages]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_ring_is_attention(ranks, packing, dtype):
    cut = segments(packing)
    arrays = reference.tensors(cut[-1].stop, dtype=getattr(torch, dtype))
    wide = [x.double() for x in arrays]
    mask = pairs.mask(cut)
    want = numpy(reference.with_gradients(lambda *x: reference.attention(*x, mask, SCALE)[0], *wide))
    largest = max(np.abs(x).max() for x in want)
    for got, whole in zip(gathered(found["attention"][packing, dtype] for found in ranks), want, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - whole).max() < TOLERANCE[dtype] * largest


def test_parts_of_a_token_s_attention_are_added_up_in_float32(ranks):
    """SURV-15: on every rank, also where its own chunks do not meet and only keys of others are added."""
    assert all(found["merged"] == [{"torch.float32"}] * len(PACKINGS) for found in ranks)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_ring_has_windows_soft_caps_and_sinks(ranks, packing, score):
    cut, options = segments(packing), dict(SCORES[score])
    *inputs, grad = reference.tensors(cut[-1].stop, dtype=torch.float64)
    mask = pairs.mask(cut, options.pop("window", None))
    inputs += [sinks()] if options.pop("sinks", False) else []

    def by_definition(q, k, v, of_heads=None):
        return reference.attention(q, k, v, mask, SCALE, sinks=of_heads, **options)[0]

    want = numpy(reference.with_gradients(by_definition, *inputs, grad))
    largest = max(np.abs(x).max() for x in want)
    parts = [found["scores"][packing, score] for found in ranks]
    # Every rank has its tokens' part of the gradient of the sinks.
    of_sinks = [sum(part[4] for part in parts)] if len(want) > 4 else []
    got = [*gathered(part[:4] for part in parts), *of_sinks]
    assert all(np.abs(a - b).max() < 1e-10 * largest for a, b in zip(got, want, strict=True))


def gathered(parts):
    """Arrays of all tokens, in their order, from what each rank has of them."""
    parts = list(parts)
    total = sum(len(part[0]) for part in parts)
    order = [token for number in range(len(parts)) for token in pairs.tokens(held(total, number, len(parts)))]
    return [np.concatenate(of_ranks)[np.argsort(order)] for of_ranks in zip(*parts, strict=True)]


def test_a_document_that_is_not_a_number_changes_no_bit_of_the_others(ranks):
    packing, dtype, spoiled = SPOILED
    before = gathered(found["attention"][packing, dtype] for found in ranks)
    after = gathered(found["spoiled"] for found in ranks)
    tokens = slice(*segments(packing)[spoiled][:2])
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(np.delete(a, tokens, 0), np.delete(b, tokens, 0))
        assert np.isnan(b[tokens]).all()


def one_process(name="Qwen2", rows=None, changed=None, groups=None):
    """Logits and gradients of the padded batch, by SDPA."""
    ids, mask = changed_batch(changed, groups)
    if rows is not None:
        mask &= torch.tensor([row in rows for row in range(len(LENGTHS))])[:, None]
    model = tiny(name, "sdpa")
    logits = model(ids, use_cache=False).logits.masked_fill(~mask[..., None], 0.0)
    logits.square().sum().backward()
    return logits.detach().numpy(), {n: p.grad.numpy() for n, p in model.named_parameters()}


def assert_close(got, want):
    """Logits and gradients to float32 rounding."""
    assert np.abs(got[0] - want[0]).max() <= 3e-6 * np.abs(want[0]).max()
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert np.abs(got[1][name] - gradient).max() <= 5e-6 * np.abs(gradient).max(), name


@pytest.mark.parametrize("way", MODELS)
def test_a_model_computes_the_same_numbers_on_every_rank(ranks, way):
    ways_of_computing = ("checkpointed", "sharded")
    want = one_process(**{name: value for name, value in MODELS[way].items() if name not in ways_of_computing})
    for found in ranks:
        assert_close(found["models"][way], want)


def test_two_rings_beside_each_other_compute_what_each_is_given(ranks):
    for number, found in enumerate(ranks):
        assert_close(found["pairs"], one_process(changed=CHANGED if number >= 2 else None))


def test_tensor_parallel_ranks_compute_the_same_numbers(ranks):
    for found in ranks:
        assert_close(found["tensor"], one_process())


@pytest.mark.parametrize("parallel", ["sequence", "tensor"])
def test_a_changed_document_changes_no_bit_of_the_others(ranks, parallel):
    for found in ranks:
        if parallel == "sequence":
            before, after = found["models"]["Qwen2"][0], found["changed"][0]
        else:
            before, after = found["tensor"][0], found["tensor, changed"][0]
        assert np.array_equal(np.delete(before, CHANGED, 0), np.delete(after, CHANGED, 0))
        assert np.abs(before[CHANGED] - after[CHANGED]).max() > 0.1


@pytest.mark.parametrize("broken", broken_plans.NAMES)
def test_a_wrong_plan_is_seen(ranks, broken):
    logits, _ = one_process()
    for found in ranks:
        assert np.abs(found["broken"][broken] - logits).max() > 1e-2 * np.abs(logits).max()


def test_a_rank_holds_its_part_of_the_tokens(ranks):
    for found in ranks:
        for tokens, (kept, peak) in found["memory"].items():
            own = tokens // len(ranks)
            # q, k, v and the output, and a logsumexp a head, of 4 heads and 2 of keys, of 8 numbers each.
            assert kept == 4 * own * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 4)
            # Outputs, gradients and what is under way: the keys of two steps, and gradients there and back.
            assert peak <= 4 * own * 320
        assert found["memory"][512][1] == 2 * found["memory"][256][1]


def test_a_mesh_without_the_dimension_is_refused(ranks):
    assert all("needs a dimension 'sequence', got ('shard',)" in found["refusal"] for found in ranks)
