"""Layers of a CPU: values and gradients of the layers' own forward, in float64 to its rounding."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_bridge.modules.cpu_layers import _Linear, _RMSNorm, _SwiGLU, product, use_cpu_layers


def made(dtype: Any = torch.float64) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=30, hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
        )  # fmt: skip
        model: Any = Qwen2ForCausalLM(config)
        model = model.to(dtype)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def results(model, tokens):
    """Logits, and the gradients of their weighted sum."""
    logits = model(input_ids=tokens, use_cache=False).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    model.zero_grad()
    (logits * weights).sum().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_model_and_its_gradients_are_the_same(dtype, tolerance):
    own, tokens = made(dtype), torch.arange(14).view(2, 7)
    ours = copy.deepcopy(own)
    use_cpu_layers(ours)
    ours, calls = copy.deepcopy(ours), []
    ours.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    a, b = results(own, tokens), results(ours, tokens)
    assert calls and a.keys() == b.keys() and len(a) > 20
    for name, value in a.items():
        np.testing.assert_allclose(b[name], value, atol=tolerance * float(value.abs().max()), rtol=0, err_msg=name)


def test_frozen_weights_have_no_gradient_and_others_the_same():
    own = made()
    for name, parameter in own.named_parameters():
        parameter.requires_grad_("up_proj" in name or "q_proj.bias" in name)
    ours = copy.deepcopy(own)
    use_cpu_layers(ours)
    tokens = torch.arange(14).view(2, 7)
    a, b = results(own, tokens), results(ours, tokens)
    assert a.keys() == b.keys() and len(a) == 5
    for name, value in a.items():
        np.testing.assert_allclose(b[name], value, atol=1e-12 * float(value.abs().max()), rtol=0, err_msg=name)


def test_gradients_by_differences():
    torch.manual_seed(1)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(_Linear.apply, (random(2, 3, 4), random(5, 4), random(5)))
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 1e-3), (random(2, 3, 4), random(4)))
    assert torch.autograd.gradcheck(_SwiGLU.apply, (random(2, 3, 4), random(5, 4), random(5, 4), random(4, 5)))


def test_products_of_onednn_are_those_of_torch():
    torch.manual_seed(2)
    for rows in (1, 7, 300):
        x, weight, bias = torch.randn(rows, 600), torch.randn(500, 600), torch.randn(500)
        for other in (weight, torch.randn(600, 500).T):
            exact = (x.double() @ other.double().T + bias.double()).float()
            # The order of 600 terms is the processor's: 1.2e-4 was seen, one bfloat16 product is 0.1 off.
            np.testing.assert_allclose(product(x, other, bias), exact, rtol=0, atol=4e-4)


def test_a_swiglu_keeps_less_than_its_layers():
    def kept(model):
        weights, arrays = {x.data_ptr() for x in model.parameters()}, {}

        def pack(x):
            if x.data_ptr() not in weights:
                arrays[x.data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.model.layers[0](torch.randn(1, 50, 128), position_embeddings=(torch.ones(1, 50, 32),) * 2)
        return sum(x.numel() for x in arrays.values())

    own = made(torch.float32)
    before = kept(own)
    use_cpu_layers(own)
    # Of 50 tokens, two arrays of the 160 inner units: silu(gate), and its product.
    assert before - kept(own) >= 50 * 2 * 160


@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "empty", "subclass"])
def test_elsewhere_the_layers_own_forward_runs(kind, monkeypatch):
    def refused(*_):
        raise AssertionError("not for this layer")

    for function in (_Linear, _RMSNorm, _SwiGLU):
        monkeypatch.setattr(function, "apply", refused)
    model = made(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    use_cpu_layers(model)
    if kind == "subclass":
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, type("Sharded", (nn.Parameter,), {})(parameter.detach()))
    tokens = torch.zeros(1, 0, dtype=torch.long) if kind == "empty" else torch.arange(5)[None]
    with torch.autocast("cpu", enabled=kind == "autocast"):
        assert model.model.layers[0].mlp(model.model.embed_tokens(tokens)).shape[1] == tokens.shape[1]
        assert model.model.norm(model.model.embed_tokens(tokens)).shape[1] == tokens.shape[1]


def test_a_layer_with_hooks_is_called():
    model, seen = made(torch.float32), []
    use_cpu_layers(model)
    mlp = model.model.layers[1].mlp
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    mlp(torch.randn(1, 3, 128))
    assert seen == [(1, 3, 160)]


def test_a_forward_of_its_own_stays():
    module = torch.nn.Linear(2, 2)
    module.forward = lambda x: x + 1
    use_cpu_layers(module)
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
