"""A tokenizer's ids are those of its tokenizer.json, whatever class is named beside it, before and after an export."""

import json
import re

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from rl_bridge.models.pretrained import tokenizer_of
from rl_bridge.models.tokenizer_files import FAST, config_for_all, write_tokenizer
from tests.support.chat_templates import bytes_tokenizer, pieces_tokenizer

TEXTS = ["hello world", " 2023 650841823", "a\n\n  b\t12\r\n", "naïve  – 🙂 It's", "x<|im_start|> y <|im_end|>z"]
FAMILIES = sorted(set(TOKENIZER_MAPPING_NAMES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
QUICK = ("bert", "cohere", "deepseek_v3", "gemma2", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3")
QUICK += ("qwen2", "qwen3", "smollm3", "starcoder2", "xlnet")
OTHERS = ["LlamaTokenizerFast", "Qwen2TokenizerFast", "GPT2TokenizerFast", "GemmaTokenizer", "CohereTokenizerFast"]


def numbers_in_threes():
    """Byte level, with numbers cut into threes and a normaliser; families of byte level cut otherwise."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace("hello", "Hello")
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_alone])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["Hello world 202 3 202 650 841 823"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=["<|im_start|>"]
    )


MADE = {"threes": numbers_in_threes, "bytes": lambda: bytes_tokenizer("llama3"), "pieces": pieces_tokenizer}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Kind → folder with its tokenizer."""
    folders = {}
    for kind, make in MADE.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        make().save_pretrained(folders[kind])
    return folders


def place(written, folder, family=None, name=None, **config):
    """A folder of that family, with the files of a tokenizer whose class has that name."""
    folder.mkdir()
    for file in written.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if family is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
    about = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": name} | config
    for field in ("backend", *(field for field, value in about.items() if value is None)):
        about.pop(field, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def require_ids_of_the_file(folder, **options):
    """The tokenizer of a folder, whose ids are those of the tokenizers library."""
    own, tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")), tokenizer_of(str(folder), **options)
    for text in TEXTS:
        for special in (False, True):
            ids = own.encode(text, add_special_tokens=special).ids
            assert tokenizer(text, add_special_tokens=special).input_ids == ids, (text, type(tokenizer))
    return tokenizer


def require_export(tokenizer, folder, out):
    """The export has the same file, ids, special tokens and template."""
    out.mkdir()
    write_tokenizer(tokenizer, out)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    again = require_ids_of_the_file(out, alone=True)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.extra_special_tokens == tokenizer.extra_special_tokens
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    return json.loads((out / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_ids_are_those_of_the_file_in_every_family(family, written, tmp_path):
    own = TOKENIZER_MAPPING_NAMES[family] or "PreTrainedTokenizerFast"
    folder = place(written["threes"], tmp_path / "model", family, own.removesuffix("Fast") + "Fast")
    require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")


@pytest.mark.parametrize("name", [*OTHERS, "PreTrainedTokenizerFast", "TokenizersBackend", None])
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "threes"), ("llama", "threes"), ("llama", "pieces"), ("mistral", "bytes")]
)
def test_ids_are_those_of_the_file_under_a_class_of_another_family(family, name, kind, written, tmp_path):
    folder = place(written[kind], tmp_path / "model", family, name)
    config = require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "another class of transformers 4 may build it anew"
    names, side = config["model_input_names"], config["padding_side"]
    assert (names, side) == (["input_ids", "attention_mask"], tokenizer_of(str(folder)).padding_side)


def test_the_class_that_reads_other_ids_is_named_and_not_exported(written, tmp_path, capsys):
    folder = place(written["threes"], tmp_path / "model", "qwen2", "Qwen2TokenizerFast")
    config = require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    printed = capsys.readouterr().out
    assert re.search(r"its tokenizer.json reads from token \d+ on of .* the ids \[.*\] and not \[.*\], as", printed)
    assert "transformers' Qwen2Tokenizer does not: the file is followed" in printed


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("gemma2", "GemmaTokenizerFast", "and not with the error Unk token"),
        ("xlnet", "XLNetTokenizerFast", "transformers fails on its tokenizer ("),
    ],
)
def test_a_class_that_fails_on_the_file_is_named(family, name, message, written, tmp_path, capsys):
    folder = place(written["threes"], tmp_path / "model", family, name)
    config = require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert message in capsys.readouterr().out


def test_settings_that_change_the_file_are_refused_with_both_ids(written, tmp_path):
    folder = place(written["threes"], tmp_path / "model", "qwen2", "Qwen2Tokenizer", split_special_tokens=True)
    with pytest.raises(ValueError, match=r"tokenizer.json reads from token \d+ on of .* the ids \[.*\] and not \[.*\]"):
        tokenizer_of(str(folder))


def test_truncation_and_padding_of_the_file_cut_nothing(written, tmp_path):
    folder = place(written["threes"], tmp_path / "model", "llama", "LlamaTokenizerFast")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = core.encode(TEXTS[1], add_special_tokens=False).ids
    core.enable_truncation(3)
    core.enable_padding(length=40)
    core.save(str(folder / "tokenizer.json"))
    assert tokenizer_of(str(folder))(TEXTS[1], add_special_tokens=False).input_ids == expected


def test_special_tokens_that_the_class_alone_names_stay(written, tmp_path):
    folder = place(written["threes"], tmp_path / "model", "llama", "LlamaTokenizerFast", eos_token=None)
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens([AddedToken("</s>", special=True)])
    core.save(str(folder / "tokenizer.json"))
    tokenizer = require_ids_of_the_file(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", core.token_to_id("</s>"))


def test_a_tokenizer_with_more_tokens_than_its_file_is_exported_with_them(written, tmp_path):
    folder, out = place(written["threes"], tmp_path / "model", "qwen2", "PreTrainedTokenizerFast"), tmp_path / "out"
    tokenizer = tokenizer_of(str(folder))
    tokenizer.add_special_tokens({"pad_token": "<|new pad|>"})
    out.mkdir()
    write_tokenizer(tokenizer, out)
    again = require_ids_of_the_file(out, alone=True)
    assert again.pad_token_id == tokenizer.pad_token_id == len(tokenizer) - 1


# add_bos_token and add_eos_token of tokenizer_config.json: transformers 5 follows tokenizer.json alone.

ENDS = {"add_bos_token": "<|im_start|>", "add_eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def marked(written, tmp_path_factory):
    """The flags that a file has → folder with its tokenizer."""
    folders = {}
    for flags in ((), *((flag,) for flag in ENDS), tuple(ENDS)):
        folder = folders[flags] = tmp_path_factory.mktemp("-".join(flags) or "none")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(written["threes"], bos_token="<|im_start|>")
        for flag in flags:
            setattr(tokenizer, flag, True)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GemmaTokenizer", "Qwen2TokenizerFast", FAST])
@pytest.mark.parametrize("flag", ENDS)
@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("does", [True, False])
def test_a_flag_that_the_file_does_not_follow_is_named(flag, value, does, name, marked, tmp_path, capsys):
    folder = place(marked[(flag,) if does else ()], tmp_path / "model", None, name, **{flag: value})
    tokenizer = require_ids_of_the_file(folder, alone=True)
    printed, obeys = capsys.readouterr().out, name in ("LlamaTokenizerFast", "GemmaTokenizer")
    sentence = f'says "{flag}": {json.dumps(value)}, which transformers 4 obeys, and its tokenizer.json does otherwise'
    assert (sentence in printed) == (obeys and value is not None and value != does)
    assert printed.count("does otherwise") == (sentence in printed)
    exported = require_export(tokenizer, folder, tmp_path / "out")
    assert exported.get(flag) == (None if value is None else does), "who reads the flag alone does as the file"


@pytest.mark.parametrize("before", [(), ("add_bos_token",), tuple(ENDS)])
@pytest.mark.parametrize("flag", ENDS)
@pytest.mark.parametrize("value", [True, False])
def test_a_flag_that_is_set_on_the_tokenizer_is_exported(flag, value, before, marked, tmp_path):
    folder, out = place(marked[before], tmp_path / "model", None, FAST), tmp_path / "out"
    tokenizer = tokenizer_of(str(folder), alone=True)
    for other in before:
        setattr(tokenizer, other, True)
    setattr(tokenizer, flag, value)
    out.mkdir()
    write_tokenizer(tokenizer, out)
    again, expected = require_ids_of_the_file(out, alone=True), {*before, flag} if value else {*before} - {flag}
    ids = again("hello").input_ids
    assert ids == tokenizer("hello").input_ids
    assert (ids[0] == again.bos_token_id, ids[-1] == again.eos_token_id) == tuple(flag in expected for flag in ENDS)


NAMED = {"image_token": "<|pad|>"}


@pytest.mark.parametrize(
    ("read", "listed", "named"),
    [
        ({}, ["<|im_start|>"], None),
        ({"extra_special_tokens": ["<|im_start|>"]}, ["<|im_start|>"], None),
        ({"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": {}}, ["<|im_start|>"], None),
        ({"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": NAMED}, ["<|im_start|>"], NAMED),
        ({"extra_special_tokens": NAMED}, None, NAMED),
    ],
)
def test_special_tokens_are_written_as_transformers_4_reads_them(read, listed, named, written, tmp_path):
    about = {"extra_special_tokens": None, "added_tokens_decoder": None} | read if read else {}
    folder = place(written["threes"], tmp_path / "model", "qwen2", "Qwen2TokenizerFast", **about)
    config = require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")
    assert config.get("additional_special_tokens") == listed
    assert config.get("extra_special_tokens") == named
    assert config["eos_token"] == "<|im_end|>" and config["pad_token"] == "<|pad|>"


def test_code_of_the_folder_and_its_templates_are_not_named_in_the_configuration(written, tmp_path):
    about = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "chat_template": "{{ messages }}", "legacy": False}
    folder = place(written["threes"], tmp_path / "model", "llama", "PreTrainedTokenizerFast", **about)
    config = require_export(require_ids_of_the_file(folder), folder, tmp_path / "out")
    assert "auto_map" not in config and "chat_template" not in config and config["legacy"] is False
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_new_tokenizer_is_of_the_class_that_every_version_reads():
    assert config_for_all({"tokenizer_class": "TokenizersBackend"}) == {"tokenizer_class": "PreTrainedTokenizerFast"}
