import copy
import importlib.util
import tomllib
from pathlib import Path

import pytest
import torch

from rl_bridge.models import small
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.parallel.attention.register import NAME
from rl_bridge.parallel.probe import probe

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (small.PACKAGE, *small.READERS)),
    reason="make install-smollm2",
)


def test_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(small, "PACKAGE", "no_such_package_smollm2")
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package_smollm2.*make install-smollm2"):
        small.load_smollm2()


@pytest.mark.parametrize("absent", [0, 1])
def test_each_package_that_reads_the_file_is_asked_for(monkeypatch, absent):
    readers = ["torch", "torch"]
    readers[absent] = "no_such_reader"
    monkeypatch.setattr(small, "PACKAGE", "torch")
    monkeypatch.setattr(small, "READERS", tuple(readers))
    with pytest.raises(ModuleNotFoundError, match=r"SmolLM2 needs no_such_reader; install with: make install-smollm2"):
        small.load_smollm2()


def test_the_extra_installs_what_reads_the_file():
    project = tomllib.loads(Path(small.__file__).parents[3].joinpath("pyproject.toml").read_text("utf-8"))
    extra = " ".join(project["project"]["optional-dependencies"]["reasoning"])
    assert all(f"{name}>=" in extra for name in small.READERS)


@needs_model
def test_incomplete_package_names_the_file(monkeypatch):
    monkeypatch.setattr(small, "FILE", "absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf.*make install-smollm2"):
        small.load_smollm2()


# Reading the file takes 20 seconds on an idle machine, hence "slow".
@pytest.fixture(scope="module")
def loaded():
    return small.load_smollm2()


@pytest.mark.slow
@needs_model
def test_model_is_trainable_float32_with_tied_embeddings(loaded):
    model, _ = loaded
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
@needs_model
def test_a_source_gives_the_same_model(loaded):
    wanted, _ = loaded
    source = small.SmolLM2Source()
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.to_dict() == wanted.config.to_dict()
    assert model.generation_config == wanted.generation_config
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.slow
@needs_model
def test_padding_is_not_the_end_of_a_turn(loaded):
    model, tokenizer = loaded
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.slow
@needs_model
def test_every_digit_is_a_token(loaded):
    _, tokenizer = loaded
    text = "12345 + 67\n\n89"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    assert [token for token in tokens if token.strip("Ġ").isdigit()] == list("123456789")
    assert tokens[-3:] == ["ĊĊ", "8", "9"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.slow
@needs_model
def test_knows_the_capital_of_france(loaded):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == tokenizer.eos_token_id


@pytest.mark.slow
@needs_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_rounding_is_not_taken_for_an_error(loaded, dtype):
    """In bfloat16 rounding moves a layer's gradient by as much as its norm: the arrangements are right all the same."""
    model = copy.deepcopy(loaded[0]).to(dtype)
    use_rl_fn_attention(model)
    found = probe(model, exact=dtype == torch.float32)
    assert (found.attention, found.packed, found.shared, dict(found.notes)) == (NAME, True, True, {})
