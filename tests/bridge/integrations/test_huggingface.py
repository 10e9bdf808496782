"""Fused log-probabilities of many architectures equal log_softmax of their logits, value and gradient."""

import pytest
import torch

from rl_bridge.integrations.huggingface import fuse_linear_logprobs, head_options, token_logprobs
from tests.bridge.integrations.tiny_models import MODELS, tiny


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_models_logits(name):
    model = fuse_linear_logprobs(tiny(name))
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False

    def gradients(logprobs, entropy):
        model.zero_grad()
        ((logprobs - 0.1 * entropy) * mask).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    out = model.token_logprobs(ids, mask=mask, temperature=0.7, attention_mask=torch.ones_like(ids))
    log_p = torch.log_softmax(model(input_ids=ids).logits[:, :-1] / 0.7, -1)
    own = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(out.logprobs, own * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.entropy, entropy * mask, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(out.logprobs, out.entropy), gradients(own, entropy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_options_are_read_from_the_configuration():
    assert head_options(tiny("Gemma2")) == (1.0, 2.0)
    assert head_options(tiny("Cohere")) == (0.25, None)
    assert head_options(tiny("Granite")) == (0.25, None)


def test_a_head_that_does_something_else_is_refused():
    model = tiny("Qwen2")
    own = model.forward
    model.forward = lambda *args, **kwargs: _doubled(own(*args, **kwargs))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM: fused log-probabilities differ from the model's own by"):
        fuse_linear_logprobs(model)
    assert not hasattr(model, "token_logprobs") and not model.training


def _doubled(output):
    output.logits = output.logits * 2.0
    return output


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="Qwen2Model has no output embeddings"):
        token_logprobs(tiny("Qwen2").base_model, torch.zeros(1, 3, dtype=torch.long))


def test_kept_sets_and_temperatures_a_token():
    model = tiny("Qwen2")
    ids = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(1))
    allowed_tokens = torch.cat(
        [ids[:, 1:, None], torch.randint(61, (2, 4, 6), generator=torch.Generator().manual_seed(2))], -1
    )
    heat = torch.linspace(0.5, 2.0, 8).view(2, 4)
    out = token_logprobs(model, ids, allowed_tokens=allowed_tokens, temperature=heat)
    logits = model(input_ids=ids).logits[:, :-1] / heat[..., None]
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, allowed_tokens, True)
    log_p = torch.log_softmax(logits.masked_fill(~kept, float("-inf")), -1)
    torch.testing.assert_close(out.logprobs, log_p.gather(-1, ids[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-5)
