"""A small model as the tests of vLLM need it: heads of 32, which its attention on a CPU can do, and sharp logits."""

import pytest
import torch

from rl_bridge.models.small import TinySource, character_tokenizer
from tests.bridge.rollout.distribution import HOSTILE
from tests.bridge.rollout.vllm.starts import quick_starts

ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="session", autouse=True)
def quick(request):
    """Only where tests of vLLM run: the others need not have it."""
    if not any(item.get_closest_marker("vllm") for item in request.session.items):
        yield
        return
    with quick_starts():
        yield


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture(scope="session")
def model(tokenizer):
    """Sharper than at its start, so that truncation cuts something, and not just repeating its last token.

    S24: its folder has sampling of its own, and every test is as if it had not.
    """
    model = TinySource.for_tokenizer(tokenizer, hidden=64, layers=2, heads=2, key_value_heads=1, seed=2).whole()
    model.requires_grad_(False)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        for weight in model.model.layers.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    model.generation_config.update(**HOSTILE)
    return model


@pytest.fixture(scope="session")
def folder(model, tokenizer, tmp_path_factory):
    """The model and its tokenizer in Hugging Face format."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
