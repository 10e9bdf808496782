"""Models that cannot be trained and rows that do not fit are refused before training starts."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from rl_bridge.models.pretrained import load_pretrained, new_for_rows, pretrained, save_pretrained
from rl_bridge.models.row_checks import check_rows, positions_of, prompted, supervised
from rl_bridge.models.small import TinySource, character_tokenizer, tiny_qwen2
from tests.support.chat_templates import bytes_tokenizer, pieces_tokenizer

TINY = {"hidden": 16, "layers": 1, "heads": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture
def folder(tmp_path):
    """A model as this library saves it, of a task without a minus sign."""
    tokenizer = character_tokenizer("0123456789+=")
    save_pretrained(tmp_path / "model", tiny_qwen2(tokenizer, **TINY), tokenizer)
    return tmp_path / "model"


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_character_that_a_saved_tokenizer_does_not_know_is_refused(folder):
    source, tokenizer = pretrained(str(folder))
    check_rows(source, tokenizer, [{"prompt": "45+12="}], prompted(tokenizer))
    rows = [{"prompt": "45+12="}, {"prompt": "45-12=", "_where": "problems.jsonl, row 2"}]
    message = "problems.jsonl, row 2: the tokenizer cannot encode the prompt '45-12='"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rows(source, tokenizer, rows, prompted(tokenizer))
    rows = [{"prompt": "45+12=", "answer": "-3"}]
    check_rows(source, tokenizer, rows, prompted(tokenizer))  # the answer is not encoded
    with pytest.raises(ValueError, match=r"row 1: the tokenizer cannot encode the answer '-3'"):
        check_rows(source, tokenizer, rows, supervised(tokenizer))


@pytest.mark.parametrize("text", [" a  b\n\tc ", "naïve – “quotes”", "中文 🙂 e\u0301", "ﬁne ½ Ⅳ"])
def test_tokenizers_that_keep_every_byte_pass(text):
    tokenizer = bytes_tokenizer("chatml")
    source = TinySource.for_tokenizer(tokenizer, **TINY)
    check_rows(source, tokenizer, [{"prompt": text, "answer": text}], supervised(tokenizer))
    check_rows(
        source, tokenizer, [{"messages": [*CHAT, {"role": "assistant", "content": text}]}], supervised(tokenizer)
    )


def test_spaces_that_a_tokenizer_of_pieces_adds_and_strips_are_none_that_it_loses():
    tokenizer = pieces_tokenizer()
    source = TinySource.for_tokenizer(tokenizer, **TINY)
    check_rows(source, tokenizer, [{"prompt": "the answer is 12", "answer": "12"}], supervised(tokenizer))
    with pytest.raises(ValueError, match=r"the tokenizer loses the character '→' \(RIGHTWARDS ARROW\): '1→2'"):
        check_rows(source, tokenizer, [{"prompt": "1→2", "answer": "12"}], supervised(tokenizer))


def test_rows_that_cannot_be_encoded_are_named_up_to_five(tmp_path):
    tokenizer = bytes_tokenizer("thoughts")
    thinking = [CHAT[0], {"role": "assistant", "content": "<think>1</think>2"}, *CHAT]
    rows = [{"messages": CHAT, "_where": "a.jsonl, row 1"}]
    rows += [{"messages": thinking, "_where": f"a.jsonl, row {n}"} for n in range(2, 9)]
    with pytest.raises(ValueError) as raised:
        check_rows(TinySource.for_tokenizer(tokenizer, **TINY), tokenizer, rows, supervised(tokenizer))
    message = str(raised.value)
    assert message.startswith("a.jsonl, row 2: the chat template of this ") and "row 6; " in message
    assert "row 7" not in message and message.endswith("and 2 more bad rows of 8")


def test_a_row_longer_than_the_models_positions(folder):
    tokenizer = character_tokenizer("0123456789+=")
    source = TinySource.for_tokenizer(tokenizer, **TINY, max_positions=12)
    check_rows(source, tokenizer, [{"prompt": "1" * 8}], prompted(tokenizer), new_tokens=4)
    with pytest.raises(ValueError, match=r"has 9 tokens and 4 are .* 12 positions: a smaller --policy\.sampling\.max-"):
        check_rows(source, tokenizer, [{"prompt": "1" * 9}], prompted(tokenizer), new_tokens=4)
    with pytest.raises(ValueError, match=r"row 2: the row has 13 tokens; the model has 12 positions$"):
        check_rows(source, tokenizer, [{"prompt": "1" * 8, "answer": a} for a in (123, 1234)], supervised(tokenizer))


def test_a_vocabulary_larger_than_the_embedding(folder):
    source, _ = pretrained(str(folder))
    larger = character_tokenizer("0123456789+=abc")
    check_rows(source, larger, [{"prompt": "1+1="}], prompted(larger))
    with pytest.raises(ValueError, match=r"row 1: the row has the token id 15 \('b'\), and the model has 14 em"):
        check_rows(source, larger, [{"prompt": "b+1="}], prompted(larger))
    for huge in (10**9, 2**31, 2**63, 10**30):
        with pytest.raises(ValueError, match=rf"row 1: the row has the token id {huge}.*, and the model has 14 em"):
            check_rows(source, larger, [{"prompt": [1, huge]}], prompted(larger))
    larger.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ValueError, match="the eos_token has the id 17, and the model has 14 embeddings"):
        check_rows(source, larger, [{"prompt": "1+1="}], prompted(larger))


def test_a_new_model_fits_the_rows_that_it_is_made_for():
    rows = [{"prompt": "ab→", "answer": 12}]
    source, tokenizer = new_for_rows(rows, seed=0)
    check_rows(source, tokenizer, rows, supervised(tokenizer))


@pytest.mark.parametrize("load", [pretrained, load_pretrained])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 are not stored \(the first: \['model\.norm\.weight'\]\)"),
        (
            lambda t: t.__setitem__("model.norm.gain", t.pop("model.norm.weight")),
            r"\['model\.norm\.weight'\]\), 1 are not of the model \(the first: \['model\.norm\.gain'\]\)",
        ),
        (
            lambda t: t.__setitem__("model.norm.weight", torch.ones(5)),
            r"'model\.norm\.weight': the model's shape is \(16",
        ),
        (
            lambda t: t.__setitem__("model.layers.0.mlp.up_proj.weight", torch.ones(64, 16, dtype=torch.int8)),
            r"1 weights of '.*model' are quantised or whole numbers.*'model\.layers\.0\.mlp\.up_proj\.weight' of typ",
        ),
    ],
    ids=["missing", "renamed", "shape", "int8"],
)
def test_weights_that_would_become_random_are_refused_by_name(folder, change, message, load):
    spoil(folder, change)
    with pytest.raises(ValueError, match=message):
        load(str(folder))


def test_a_quantised_checkpoint_is_refused_by_its_method(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the weights of '.*model' are quantised \(bitsandbytes\), and quantised w"):
        pretrained(str(folder))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: BertForMaskedLM(BertConfig(vocab_size=30, **SMALL)),
            r"is a 'bert' whose tokens attend to later ones \(config\.is_decoder is False\): no causal language model",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
            ),
            r"is a 't5', of which transformers has no causal language model",
        ),
        (
            lambda: ViTModel(ViTConfig(image_size=16, patch_size=8, **SMALL)),
            r"is a 'vit', of which transformers has no",
        ),
    ],
    ids=["bert", "t5", "vit"],
)
def test_what_is_no_causal_language_model_is_refused_by_its_kind(tmp_path, model, message):
    character_tokenizer("01").save_pretrained(tmp_path)
    model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        pretrained(str(tmp_path))


def test_a_decoder_of_that_kind_is_accepted(tmp_path):
    character_tokenizer("01").save_pretrained(tmp_path)
    from transformers import BertLMHeadModel

    BertLMHeadModel(BertConfig(vocab_size=30, is_decoder=True, **SMALL)).save_pretrained(tmp_path)
    assert pretrained(str(tmp_path))[0].name == str(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 1


def test_token_ids_below_zero_are_no_tokens(folder):
    source, tokenizer = pretrained(str(folder))
    with pytest.raises(ValueError, match=r"row 1: a token id is at least 0, got -1"):
        check_rows(source, tokenizer, [{"prompt": [3, -1, 4]}], prompted(tokenizer))


@pytest.mark.parametrize(("count", "positions"), [(1, 1), (7, 7), (0, None), (-1, None), (None, None), ("8", None)])
def test_positions_that_a_model_counts(count, positions):
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(max_position_embeddings=count)
    assert positions_of(model) == positions
