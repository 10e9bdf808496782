import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_bridge.models.encoding import encode_prompt, encode_row, messages_of
from rl_bridge.models.pretrained import load_pretrained, new_for_rows, save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2

ALPHABET = "ab 0\n\t.'é→ß中'\"<>"
ALPHABET = "".join(dict.fromkeys(ALPHABET))
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(st.sampled_from(ALPHABET), max_size=20))
def test_characters_round_trip(text):
    ids = TOKENIZER(text).input_ids
    assert ids == [ALPHABET.index(character) + 2 for character in text]
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["A", "ab!", "ab\r"])
def test_an_unknown_character_raises(text):
    with pytest.raises(ValueError, match=re.escape(f"the tokenizer cannot encode the prompt {text!r}")):
        encode_prompt(TOKENIZER, text)


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_is_distinct_characters(alphabet):
    with pytest.raises(ValueError, match="alphabet must be distinct characters"):
        character_tokenizer(alphabet)


def test_prompts_as_text_ids_and_messages():
    assert encode_prompt(TOKENIZER, "ab") == encode_prompt(TOKENIZER, [2, 3]) == [2, 3]
    chat = character_tokenizer(ALPHABET)
    chat.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert encode_prompt(chat, [{"role": "user", "content": "ab"}]) == TOKENIZER("ab>").input_ids


def test_the_messages_of_a_prompt():
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"})
    assert messages_of(messages) == messages and messages_of("ab") == messages[1:] and messages_of([2, 3]) == ()


@pytest.mark.parametrize("prompt", ["", [], [1.5], ["ab"], [None]])
def test_prompts_that_are_none_of_these(prompt):
    with pytest.raises(ValueError, match="a prompt must be text, messages or token ids and not be empty"):
        encode_prompt(TOKENIZER, prompt)


def test_an_answer_as_a_completion_ends_with_the_end_of_sequence():
    row = {"prompt": "ab", "answer": 0}
    trajectory = encode_row(TOKENIZER, row)
    assert (trajectory.prompt_tokens, trajectory.sampled_tokens) == ((2, 3), (ALPHABET.index("0") + 2, 1))
    assert trajectory.finish_reason == "stop" and trajectory.row is row
    assert trajectory.messages == ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "0"})
    with pytest.raises(ValueError, match="the tokenizer cannot encode the answer '7'"):
        encode_row(TOKENIZER, {"prompt": "ab", "answer": 7})


def test_special_tokens_are_before_the_prompt_alone():
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    trajectory = encode_row(tokenizer, {"prompt": "ab", "answer": "ba"})
    assert (trajectory.prompt_tokens, trajectory.sampled_tokens) == ((0, 2, 3), (3, 2, 1))


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator(tokenizer):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=3)
    other = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=4)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_the_shape_is_checked_and_the_default_has_a_million_parameters(tokenizer):
    with pytest.raises(ValueError, match="hidden must be a multiple of heads, got hidden=10, heads=4"):
        tiny_qwen2(tokenizer, hidden=10, heads=4)
    with torch.device("meta"):
        model = tiny_qwen2(tokenizer)
    assert 1.0e6 < sum(p.numel() for p in model.parameters()) < 1.1e6


def test_a_saved_model_is_the_same_in_transformers(tmp_path, new_model, tokenizer):
    model, ids = new_model(seed=1), torch.tensor([tokenizer("12+34=").input_ids])
    save_pretrained(tmp_path / "model", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reloaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert reloaded_tokenizer("12+34=").input_ids == ids[0].tolist()
    assert (reloaded_tokenizer.pad_token_id, reloaded_tokenizer.eos_token_id) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    ours, ours_tokenizer = load_pretrained(str(tmp_path / "model"))
    assert torch.equal(ours(ids).logits, model(ids).logits)
    assert ours_tokenizer.decode(ids[0]) == "12+34="


def test_a_failed_save_leaves_nothing(tmp_path, tokenizer):
    class Broken:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path / "model", Broken(), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_pad_token_pads_with_the_end_of_sequence(tmp_path, new_model):
    tokenizer = character_tokenizer("0123456789+-=")
    save_pretrained(tmp_path / "model", new_model(), tokenizer)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    assert load_pretrained(str(tmp_path / "model"))[1].pad_token_id == 1


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tmp_path, new_model):
    tokenizer = character_tokenizer("0123456789+-=")
    tokenizer.eos_token = None
    save_pretrained(tmp_path / "model", new_model(), tokenizer)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_pretrained(str(tmp_path / "model"))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"no model can be loaded from '.*empty'"):
        (tmp_path / "empty").mkdir()
        load_pretrained(str(tmp_path / "empty"))


def test_a_new_model_knows_every_character_of_the_rows():
    rows = [{"prompt": "ab", "answer": 12}, {"prompt": "c", "answer": "é"}]
    source, tokenizer = new_for_rows(rows, seed=0)
    assert tokenizer.decode(tokenizer("12abcé").input_ids) == "12abcé"
    assert source.whole().config.vocab_size == len(tokenizer) == 8


def test_a_new_model_has_no_chat_template():
    with pytest.raises(ValueError, match=r"a\.jsonl, row 3: chat messages need a model with a chat template"):
        new_for_rows([{"prompt": [{"role": "user", "content": "a"}], "_where": "a.jsonl, row 3"}], seed=0)
