"""Models with windows, soft caps and sinks, arranged in every way, against their own eager attention (ENG-4, MUSA-5).

ENG-16: windows shorter than the documents. MUSA-5: soft caps of attention without a plan.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import DynamicCache

from rl_bridge.parallel.documents import Documents
from tests.bridge.parallel.attention.families import FAMILIES, LENGTHS, outputs, tiny
from tests.support.attending_models import batch
from tests.support.ranks import as_rank, found_by_ranks

TOLERANCE = 1e-5


@functools.cache
def alone(family):
    """Each document by itself, by the model's own eager attention."""
    return outputs(tiny(family, "eager"), "alone")


def assert_close(got, want):
    assert (got[0] - want[0]).abs().max() < TOLERANCE * want[0].abs().max()
    assert got[1].keys() == want[1].keys()
    largest = max(gradient.abs().max() for gradient in want[1].values())
    for name, gradient in want[1].items():
        # The rounding of a gradient that nearly cancels is that of its parts.
        scale = max(gradient.abs().max(), 0.01 * largest)
        assert (got[1][name] - gradient).abs().max() < TOLERANCE * scale, name


@pytest.mark.parametrize("way", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_own_eager_attention(family, way):
    assert_close(outputs(tiny(family), way), alone(family))


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"])
def test_sinks_have_gradients(family):
    sinks = {name: x for name, x in outputs(tiny(family), "packed")[1].items() if "sink" in name}
    assert sinks and all(x.abs().max() > 1e-4 for x in sinks.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_test_above_would_miss_if_windows_and_scores_did_not_count(family):
    config = tiny(family).config
    for name, value in {"sliding_window": 4096, "attn_logit_softcapping": 4096.0}.items():
        if getattr(config, name, None) is None:
            continue
        model = tiny(family, "eager")
        setattr(model.config, name, value)
        for module in model.modules():
            if hasattr(module, name):
                setattr(module, name, value)
        changed = outputs(model, "alone")[0] - alone(family)[0]
        assert changed.abs().max() > 1e-2 * alone(family)[0].abs().max(), name


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "granite_swa", "mistral"])
def test_left_padding_and_a_cache(family):
    ids, mask = batch(LENGTHS)
    model, want = tiny(family), tiny(family, "eager")
    with torch.no_grad():
        got, wanted = (m(ids.flip(1), attention_mask=mask.flip(1), use_cache=False).logits for m in (model, want))
        assert (got - wanted)[mask.flip(1)].abs().max() < TOLERANCE * wanted.abs().max()
        cache, ids = DynamicCache(config=model.config), ids[3:4, :12]
        parts = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 4], 1)]
        wanted = want(ids, use_cache=False).logits
        assert (torch.cat(parts, 1) - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def test_doge_computes_with_its_mask_and_says_what_a_plan_cannot():
    # ENG-22: AttributeError: 'functools.partial' object has no attribute 'dtype'.
    model = tiny("doge")
    assert_close(outputs(model, "padded"), alone("doge"))
    documents = Documents(LENGTHS)
    with pytest.raises(ValueError, match=r"mask of DogeAttention's own is not.*--no-packing"):
        model(documents.take(batch(LENGTHS)[0]), **documents.forward_kwargs)


def work():
    """Logits of the batch and gradients summed over the ranks, of each family, prefixes shared."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("sequence",))
    found = {}
    for family in FAMILIES:
        logits, gradients = outputs(tiny(family), "shared", mesh)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        found[family] = logits.numpy(), {name: x.numpy() for name, x in gradients.items()}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(functools.partial(as_rank, work, 2), 2, tmp_path_factory.mktemp("gloo"))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_sequence_ranks_are_its_own_eager_attention(ranks, family):
    for _, found in ranks:
        logits, gradients = found[family]
        assert_close((torch.tensor(logits), {n: torch.tensor(x) for n, x in gradients.items()}), alone(family))
