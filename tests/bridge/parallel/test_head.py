"""Log-probabilities from hidden states in one process; over several: test_layouts.py."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from rl_bridge.parallel.heads import head_of, token_logprobs
from tests.support.one_step import VOCABULARY, make, token_ids

CAP = 2.0


def gemma(cap):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=cap)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def of_logits(logits, targets, temperature):
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("own", [True, False])
def test_a_softcap_is_the_models_own_or_the_callers(own):
    ids, targets = token_ids(), token_ids().flip(1)
    with torch.no_grad():
        wanted = of_logits(gemma(CAP)(input_ids=ids).logits, targets, 0.7)
        model = gemma(CAP if own else None)
        found = token_logprobs(model, ids, targets, temperature=0.7, softcap=None if own else CAP)
        uncapped = of_logits(gemma(None)(input_ids=ids).logits, targets, 0.7)
    for a, b, c in zip(found, wanted, uncapped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert (a - c).abs().max() > 0.1


def test_two_softcaps_are_refused():
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM caps its logits at 2\.0: it takes no softcap of 3\.0"):
        token_logprobs(gemma(CAP), token_ids(), token_ids(), softcap=3.0)


def test_a_model_without_output_embeddings_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        token_logprobs(make("Llama").model, token_ids(), token_ids())


@pytest.mark.parametrize(("placement", "cut"), [(Shard(0), True), (Shard(1), False), (Replicate(), False)])
def test_only_a_head_that_is_cut_by_words_stays_cut(placement, cut):
    """Each rank has some words then, and the group the rest; of any other a rank needs the whole."""
    model = make("Llama", tied=False)
    weight = model.lm_head.weight.detach()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shared = distribute_tensor(weight, init_device_mesh("cpu", (1,)), [placement])
        model.lm_head.weight = torch.nn.Parameter(shared, requires_grad=False)
        head = head_of(model)
        assert (head.group is not None) == cut and torch.equal(head.weight, weight)
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_masked_is_zero_and_takes_no_gradient():
    model, ids = make("Llama"), token_ids()
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[1, 3] = True
    logprobs, entropy = token_logprobs(model, ids, ids.roll(-1, 1), mask=mask)
    assert entropy is not None
    assert torch.equal(logprobs != 0, mask) and torch.equal(entropy != 0, mask)
    logprobs.sum().backward()
    row = model.model.embed_tokens.weight.grad
    assert row is not None and row.isfinite().all()


def test_under_autocast_the_head_is_a_matrix_product_like_the_others():
    model, ids = make("Llama"), token_ids()
    targets = ids.roll(-1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(model, ids, targets)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    # The products of bfloat16 numbers, summed in float32, as a logits' matrix product rounds only their sums.
    logits = hidden.bfloat16().float() @ model.lm_head.weight.bfloat16().float().T
    for a, b in zip(found, of_logits(logits, targets, 1.0), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    found[0].sum().backward()
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.dtype == torch.float32
