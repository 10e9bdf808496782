"""The attention "rl_fn" in transformers' models: without a plan it is SDPA, and what no plan can hold is refused."""

from importlib import util

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, MistralConfig, MistralForCausalLM
from transformers import masking_utils as transformers_masks

from rl_bridge.parallel.attention import register, use_rl_fn_attention
from rl_bridge.parallel.attention.register import LayerMask
from rl_bridge.parallel.documents import Documents
from tests.support.attending_models import SIZES, batch, tiny

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


@pytest.mark.parametrize("size", [9, 8, 4, 1])
def test_by_a_plan_a_sliding_window_is_that_of_each_document(size):
    # ENG-16: the first document longer than the window ended a run.
    ids, mask = batch(LENGTHS)
    documents = Documents(mask.sum(1))
    with torch.no_grad():
        want = mistral("sdpa", size)(ids, use_cache=False).logits[mask]
        logits = mistral("rl_fn", size)(documents.take(ids), **documents.forward_kwargs).logits
        assert (documents.put(logits, ids.shape)[mask] - want).abs().max() < 1e-5
        other = mistral("sdpa", size + 1)(ids, use_cache=False).logits[mask]
        assert torch.equal(other, want) == (size >= max(LENGTHS))


def test_one_document_longer_than_the_window_needs_no_mask(monkeypatch):
    # Its positions begin once, so transformers takes it for a row of one document.
    ids, documents = batch([30])[0], Documents([30])
    with torch.no_grad():
        want = mistral("sdpa")(ids, use_cache=False).logits
        for name in ("sdpa_mask", "eager_mask"):
            monkeypatch.setattr(register, name, None)
        got = mistral("rl_fn")(documents.take(ids), **documents.forward_kwargs).logits
    assert (got - want).abs().max() < 1e-5


def test_a_plan_knows_the_layers_that_follow_it():
    model, documents = tiny(), Documents([4])
    model(torch.zeros(1, 4, dtype=torch.int64), **documents.forward_kwargs)
    assert documents.plan.layers == {id(layer.self_attn) for layer in model.model.layers}
    assert documents.plan.uses == 2


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
    names, attention, mask = list(AttentionInterface()), register.attention, register.mask
    assert AttentionInterface()[register.NAME] is attention
    again = util.module_from_spec(util.find_spec(register.__name__))
    again.__spec__.loader.exec_module(again)
    assert list(AttentionInterface()) == names
    assert AttentionInterface()[register.NAME] is again.attention
    assert AttentionMaskInterface()[register.NAME] is again.mask
    AttentionInterface.register(register.NAME, attention)
    AttentionMaskInterface.register(register.NAME, mask)


def said(function=transformers_masks.causal_mask_function, tokens=5, **options):
    sizes = {"batch_size": 1, "q_length": tokens, "kv_length": tokens, "mask_function": function}
    return register.mask(**sizes | {"attention_mask": None, "dtype": torch.float32} | options)


def window_of(size):
    packed = transformers_masks.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1]]))
    return transformers_masks.and_masks(transformers_masks.sliding_window_causal_mask_function(size), packed)


def chunked(size):
    return transformers_masks.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


def call(tokens=5, batch_size=1, mask=None, module=None, heads=2, **options):
    plan = Documents([2, 3]).plan
    q = torch.randn(batch_size, heads, tokens, 4, generator=torch.Generator().manual_seed(0))
    module = torch.nn.Module() if module is None else module
    return register.attention(module, q, q, q, mask, attention_plan=plan, **options)[0]


def test_a_call_by_hand():
    assert call().shape == (1, 5, 2, 4)
    harmless = {"position_ids": torch.arange(5)[None], "use_cache": False, "seq_idx": torch.zeros(1, 5)}
    nothing = dict.fromkeys(("scaling", "softcap", "s_aux", "position_bias", "cache", "anything"))
    got = call(dropout=0.0, sliding_window=3, is_causal=True, **harmless, **nothing)
    assert torch.equal(got, call())
    assert torch.equal(call(scaling=4**-0.5), call()) and not torch.equal(call(scaling=0.3), call())


def test_a_window_that_is_only_in_the_mask_counts():
    # ENG-4: Phi-3.5-MoE does not pass sliding_window=. OLMoE passes one that its mask does not have.
    assert torch.equal(call(mask=said(window_of(2))), call(sliding_window=2))
    assert torch.equal(call(mask=said(), sliding_window=2), call())
    assert not torch.equal(call(sliding_window=2), call())


def test_a_chunk_that_no_document_fills_is_no_chunk():
    assert torch.equal(call(mask=said(chunked(3))), call())


class Bidirectional(torch.nn.Module):
    is_causal = False


WITHOUT_A_WAY = [
    ({"mask": torch.ones(1, 1, 5, 5)}, "attention_mask=None.*Module's own is not.*--no-packing"),
    ({"mask": said(attention_mask=torch.ones(1, 5, dtype=torch.bool))}, "attention_mask=None"),
    ({"mask": said(chunked(2))}, "no chunked_overlay, and a document has 3 tokens.*--no-packing"),
    ({"mask": said(transformers_masks.or_masks(window_of(2), chunked(2)))}, "no or_masks"),
    ({"mask": said(transformers_masks.bidirectional_mask_function)}, "no bidirectional_mask_function"),
    (
        {"mask": said(transformers_masks.sliding_window_overlay(2))},
        "and this layer's is sliding_window_overlay",
    ),
    ({"dropout": 0.1}, "no dropout, got 0.1"),
    ({"is_causal": False}, "is causal"),
    ({"module": Bidirectional()}, "is causal"),
    ({"position_bias": torch.zeros(5, 5)}, "no position_bias, which Module has"),
    ({"s_aux": torch.zeros(3)}, r"sinks \(3,\) for 2 heads"),
    ({"indices": torch.zeros(1)}, "Module passes indices to its attention, which .* would drop"),
    ({"cache": object()}, "passes cache"),
    ({"tokens": 6}, r"one row of 5 tokens without a cache, got q \(1, 2, 6, 4\)"),
    ({"batch_size": 2}, r"one row of 5 tokens without a cache, got q \(2, 2, 5, 4\)"),
]


@pytest.mark.parametrize("options, message", WITHOUT_A_WAY, ids=[message for _, message in WITHOUT_A_WAY])
def test_what_a_plan_cannot_hold_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


WITHOUT_A_PLAN = [
    ({"head_mask": torch.ones(2)}, "Module passes head_mask to its attention"),
    ({"cache": object()}, "passes cache"),
    ({"cu_seq_lens_q": torch.tensor([0, 5])}, "got cu_seq_lens_q: .* position_ids that begin again"),
    ({"softcap": 3.0, "dropout": 0.1}, "no dropout: set attention_dropout=0"),
    ({"softcap": 3.0, "position_bias": torch.zeros(5, 5)}, "no position_bias"),
    ({"softcap": 3.0, "mask": torch.zeros(1, 1, 5, 5, requires_grad=True)}, "no mask that is learned"),
    ({"s_aux": torch.zeros(3)}, r"sinks \(3,\) for 2 heads"),
    ({"s_aux": torch.zeros(2), "keys": 7}, "5 queries after a cache, 7 keys in all, need a mask"),
]


@pytest.mark.parametrize("options, message", WITHOUT_A_PLAN, ids=[message for _, message in WITHOUT_A_PLAN])
def test_what_sdpa_would_drop_is_refused_where_it_is_not_computed(options, message):
    # ENG-4: a new family's new argument is not dropped in silence.
    options = dict(options)
    k = torch.zeros(1, 2, options.pop("keys", 5), 4)
    with pytest.raises(ValueError, match=message):
        register.attention(torch.nn.Module(), torch.zeros(1, 2, 5, 4), k, k, options.pop("mask", None), **options)


def test_an_operation_on_a_mask_reads_what_eager_attention_would():
    # ENG-22: Doge computes with its mask. A mask that says all, as None does, is causal for the model that reads it.
    for mask in (said(), said(window_of(2)), said(attention_mask=torch.arange(5)[None] < 3)):
        want = transformers_masks.eager_mask(**mask.options)
        assert isinstance(mask, torch.Tensor) and isinstance(mask, LayerMask)
        assert (mask.shape, mask.dtype, mask.device) == (want.shape, want.dtype, want.device)
        for read in (mask + 0.0, mask[:, :, :, :5], torch.where(mask != 0, mask, 0.0), mask.clone()):
            assert type(read) is torch.Tensor and torch.equal(read, want)
    assert said().for_sdpa is None
    assert repr(said(window_of(2))) == (
        "LayerMask((1, 1, 5, 5), sliding_window_overlay, causal_mask_function, packed_sequence_mask_function)"
    )


def test_a_copy_of_a_mask_in_another_dtype_is_not_made():
    # FSDP casts the arguments of layers, and activation checkpointing detaches them.
    copy = said(window_of(2)).to(torch.bfloat16).detach()
    assert isinstance(copy, LayerMask) and copy.dtype == torch.bfloat16
    assert torch.equal(call(mask=copy), call(sliding_window=2))
    assert torch.equal(copy + 0, transformers_masks.eager_mask(**copy.options))
    assert (copy + 0).dtype == torch.bfloat16


def test_the_mask_says_whether_attention_is_causal():
    # BigBirdPegasus: its layers say that they are not, and eager attention follows the mask.
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    want = register.attention(torch.nn.Module(), q, q, q, said())[0]
    assert torch.equal(register.attention(Bidirectional(), q, q, q, said())[0], want)
    all_of_them = said(transformers_masks.bidirectional_mask_function, allow_is_causal_skip=False)
    assert not torch.allclose(register.attention(Bidirectional(), q, q, q, all_of_them)[0], want)


def test_dropout_of_a_model_in_training_is_refused():
    model = tiny(attention_dropout=0.1).train()
    documents = Documents([4])
    with pytest.raises(ValueError, match="attention_dropout=0"):
        model(torch.zeros(1, 4, dtype=torch.int64), **documents.forward_kwargs)


def test_a_model_keeps_its_other_settings():
    model = tiny(attention="sdpa")
    use_rl_fn_attention(model)
    assert model.config._attn_implementation == "rl_fn"
