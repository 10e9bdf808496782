"""The attention "rl_fn" in transformers' models: without a plan it is SDPA, and what no plan can hold is refused."""

import functools
import importlib

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, MistralConfig, MistralForCausalLM

from rl_bridge.parallel.attention import register, use_rl_fn_attention
from rl_bridge.parallel.documents import Documents
from tests.bridge.parallel.models import SIZES, batch, tiny

LENGTHS = [5, 9, 3]


def left_padding(model):
    ids, mask = batch(LENGTHS)
    return model(ids.flip(1), attention_mask=mask.flip(1), use_cache=False).logits[mask.flip(1)]


def packed_position_ids(model):
    ids, mask = batch(LENGTHS)
    documents = Documents(mask.sum(1))
    return model(documents.take(ids), position_ids=documents.forward_kwargs["position_ids"], use_cache=False).logits


def with_cache(model):
    ids, _ = batch([9, 9])
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([4, 1, 4], 1)]
    return torch.cat(parts, 1)


def window(model):
    return model(batch([9, 9])[0], use_cache=False).logits


def mistral(attention, size=4):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": size})).eval()
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("call", [left_padding, packed_position_ids, with_cache])
def test_without_a_plan_it_is_sdpa(call):
    with torch.no_grad():
        assert torch.equal(call(tiny()), call(tiny(attention="sdpa")))


def test_without_a_plan_a_sliding_window_is_sdpas():
    with torch.no_grad():
        got, want = window(mistral("rl_fn")), window(mistral("sdpa"))
        assert torch.equal(got, want)
        assert not torch.equal(window(mistral("sdpa", 9)), want)


def test_a_window_as_long_as_the_documents_is_no_window():
    ids, mask = batch(LENGTHS)
    documents = Documents(mask.sum(1))

    def packed(model):
        return documents.put(model(documents.take(ids), **documents.forward_kwargs).logits, ids.shape)[mask]

    with torch.no_grad():
        want = mistral("sdpa", 9)(ids, use_cache=False).logits[mask]
        assert (packed(mistral("rl_fn", 9)) - want).abs().max() < 1e-5
        with pytest.raises(ValueError, match="no sliding window: 8 < a document of 9 tokens"):
            packed(mistral("rl_fn", 8))


def test_autocast_lowers_what_it_lowers_in_sdpa():
    model = tiny()
    ids, mask = batch([40, 40])
    documents = Documents(mask.sum(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = tiny(attention="sdpa")(ids, use_cache=False).logits
        got = documents.put(model(documents.take(ids), **documents.forward_kwargs).logits, ids.shape)
    assert got.dtype == torch.bfloat16
    # Rows are batched otherwise, so the last bit of a bfloat16 may differ.
    assert (got - want).abs().max() <= 2**-6 * want.abs().max()


def test_registering_twice_changes_nothing():
    names = list(AttentionInterface())
    before = AttentionInterface()[register.NAME]
    importlib.reload(register)
    assert list(AttentionInterface()) == names
    assert AttentionInterface()[register.NAME] is not before
    AttentionInterface.register(register.NAME, before)
    assert AttentionMaskInterface()[register.NAME] is register.mask


def call(tokens=5, batch_size=1, mask=None, module=None, **options):
    plan = Documents([2, 3]).plan
    q = torch.zeros(batch_size, 2, tokens, 4)
    module = torch.nn.Module() if module is None else module
    return register.attention(module, q, q, q, mask, attention_plan=plan, **options)[0]


def test_a_call_by_hand():
    assert call().shape == (1, 5, 2, 4)
    assert call(dropout=0.0, sliding_window=3, scaling=None, softcap=None, is_causal=True).shape == (1, 5, 2, 4)
    # Transformers' guess at documents is left unmade.
    assert call(mask=functools.partial(register.sdpa_mask, attention_mask=None)).shape == (1, 5, 2, 4)


class Bidirectional(torch.nn.Module):
    is_causal = False


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mask": torch.ones(1, 1, 5, 5)}, "attention_mask=None"),
        ({"mask": functools.partial(register.sdpa_mask, attention_mask=torch.ones(1, 5))}, "attention_mask=None"),
        ({"dropout": 0.1}, "no dropout, got 0.1"),
        ({"sliding_window": 2}, "no sliding window: 2 < a document of 3"),
        ({"is_causal": False}, "is causal"),
        ({"module": Bidirectional()}, "is causal"),
        ({"softcap": 30.0}, "no softcap"),
        ({"s_aux": torch.zeros(2)}, "no s_aux"),
        ({"tokens": 6}, r"one row of 5 tokens without a cache, got q \(1, 2, 6, 4\)"),
        ({"batch_size": 2}, r"one row of 5 tokens without a cache, got q \(2, 2, 5, 4\)"),
    ],
)
def test_what_a_plan_cannot_hold_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_dropout_of_a_model_in_training_is_refused():
    model = tiny(attention_dropout=0.1).train()
    documents = Documents([4])
    with pytest.raises(ValueError, match="attention_dropout=0"):
        model(torch.zeros(1, 4, dtype=torch.int64), **documents.forward_kwargs)


def test_a_model_keeps_its_other_settings():
    model = tiny(attention="sdpa")
    use_rl_fn_attention(model)
    assert model.config._attn_implementation == "rl_fn"
