"""Rows to token ids: whole conversations, over templates of the kinds that models have."""

import re

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rl_bridge.models.chat_templates import ChangedEarlierText, use_template
from rl_bridge.models.encoding import _ids, encode_completion, encode_prompt, encode_row, special_ids
from tests.support.chat_templates import CHATML, KINDS, bytes_tokenizer, pieces_tokenizer

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
THINKING = [*CHAT[:1], {"role": "assistant", "content": "<think>one</think> 2"}, *CHAT[2:]]
STABLE = {
    "chatml": ["2<|im_end|>", "4<|im_end|>"],
    "llama3": ["2<|eot_id|>", "4<|eot_id|>"],
    "gemma": ["2<end_of_turn>", "4<end_of_turn>"],
    "roles": ["2\n", "4\n<eos>"],
}


def drawn(tokenizer, trajectory):
    """The texts of the runs of tokens that count."""
    runs, before = [], False
    for token, counts in zip(trajectory.tokens, trajectory.loss_mask, strict=True):
        if counts:
            runs[-1:] = [[*runs[-1], token]] if before else [*runs[-1:], [token]]
        before = counts
    return [tokenizer.decode(run) for run in runs]


@pytest.fixture(scope="module")
def tokenizers():
    made = {}
    return lambda kind: made.setdefault(kind, bytes_tokenizer(kind))


@pytest.mark.parametrize("kind", STABLE)
def test_each_turn_of_the_assistant_counts_with_its_end(tokenizers, kind):
    tokenizer = tokenizers(kind)
    trajectory = encode_row(tokenizer, {"messages": CHAT})
    assert drawn(tokenizer, trajectory) == STABLE[kind]
    assert (trajectory.turns, trajectory.finish_reason) == (2, "stop")
    assert trajectory.messages == tuple(CHAT)
    # What a policy is asked in its first turn is what it has seen here.
    assert trajectory.prompt_tokens == tuple(encode_prompt(tokenizer, CHAT[:1]))
    assert {(v, m) for v, m in zip(trajectory.weights_versions, trajectory.loss_mask, strict=True)} == {
        (0, True),
        (-1, False),
    }


@pytest.mark.parametrize("kind", STABLE)
def test_a_turns_end_that_is_an_added_token_and_no_named_one_ends_the_turn(tokenizers, kind):
    """MUSA-6: as Phi-3's; the end of sequence is another token, and it is the padding too."""
    named = tokenizers(kind)
    added = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(named.backend_tokenizer.to_str()),
        bos_token=named.bos_token,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=named.chat_template,
        clean_up_tokenization_spaces=False,
    )
    found = encode_row(added, {"messages": CHAT})
    assert drawn(added, found) == [turn.replace("<eos>", "<|endoftext|>") for turn in STABLE[kind]]
    assert found.tokens.count(added.eos_token_id) == (kind == "roles")
    if kind != "roles":
        end = added.convert_tokens_to_ids(KINDS[kind][1])
        assert end not in added.all_special_ids and end in special_ids(added)


@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma"])
def test_the_tokens_are_those_of_the_template_and_begin_once(tokenizers, kind):
    tokenizer = tokenizers(kind)
    tokens = list(encode_row(tokenizer, {"messages": CHAT}).tokens)
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert tokens == whole[: len(tokens)]
    assert tokenizer.decode(whole[len(tokens) :]).strip() == ""
    assert tokens.count(tokenizer.bos_token_id) == (kind != "chatml")


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_inside_a_conversation():
    tokenizer = pieces_tokenizer()
    trajectory = encode_row(tokenizer, {"messages": CHAT})
    assert list(trajectory.tokens) == tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert drawn(tokenizer, trajectory) == ["2</s>", "4</s>"]


def test_later_turns_are_encoded_behind_earlier_ones_not_with_them(tokenizers):
    """The byte pairs of this tokenizer would join the end of the prompt with the completion."""
    tokenizer = tokenizers("roles")
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "34"}]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    trajectory = encode_row(tokenizer, {"messages": messages})
    assert trajectory.tokens[: len(whole)] != tuple(whole)
    assert trajectory.prompt_tokens == tuple(encode_prompt(tokenizer, messages[:1]))
    assert tokenizer.decode(trajectory.tokens) == tokenizer.decode(whole) + "<eos>"


def test_a_template_that_drops_earlier_thoughts_is_explained(tokenizers):
    tokenizer = tokenizers("thoughts")
    assert drawn(tokenizer, encode_row(tokenizer, {"messages": THINKING[:2]})) == ["<think>one</think> 2<|im_end|>"]
    assert drawn(tokenizer, encode_row(tokenizer, {"messages": CHAT})) == ["2<|im_end|>", "4<|im_end|>"]
    with pytest.raises(ChangedEarlierText) as raised:
        encode_row(tokenizer, {"messages": THINKING})
    message = str(raised.value)
    position = int(re.search(r"from token (\d+) on", message)[1])
    first, second = (tokenizer.apply_chat_template(THINKING[:n], return_dict=False) for n in (2, 4))
    assert first[:position] == second[:position] and first[position] != second[position]
    assert message.startswith("the chat template of this ")
    assert "changes earlier tokens when message 2 (user) is added" in message
    for words in ("<think>", "apply_chat_template=false", "--chat-template FILE of your own"):
        assert words in message


def test_a_generation_prompt_that_no_message_continues_is_explained(tokenizers):
    tokenizer = tokenizers("opens thought")
    assert drawn(tokenizer, encode_row(tokenizer, {"messages": THINKING[:2]})) == ["one</think> 2<|im_end|>"]
    with pytest.raises(ChangedEarlierText, match=r"when message 1 \(assistant\) takes the place of the generation pr"):
        encode_row(tokenizer, {"messages": CHAT[:2]})


def test_the_name_of_the_template_is_its_tokenizers(tokenizers):
    tokenizer = bytes_tokenizer("gemma")
    tokenizer.name_or_path = "org/gemma"
    row = {"prompt": [{"role": "system", "content": "Be brief."}, *CHAT[:1]], "answer": "2"}
    message = "the chat template of 'org/gemma' refuses messages of the roles system, user: System role not supported"
    with pytest.raises(ValueError, match=message):
        encode_row(tokenizer, row)
    with pytest.raises(ValueError, match=message):
        encode_prompt(tokenizer, row["prompt"])
    assert drawn(tokenizer, encode_row(tokenizer, row, apply_chat_template=False)) == ["2<eos>"]


def test_without_a_template_contents_are_concatenated(tokenizers):
    tokenizer = tokenizers("thoughts")
    trajectory = encode_row(tokenizer, {"messages": THINKING}, apply_chat_template=False)
    assert tokenizer.decode(trajectory.tokens) == "1+1?<think>one</think> 2<|im_end|>2+2?4<|im_end|>"
    assert drawn(tokenizer, trajectory) == ["<think>one</think> 2<|im_end|>", "4<|im_end|>"]
    assert trajectory.prompt_tokens == tuple(encode_prompt(tokenizer, THINKING[:1], apply_chat_template=False))
    begun = encode_row(tokenizers("gemma"), {"messages": CHAT}, apply_chat_template=False)
    assert tokenizers("gemma").decode(begun.tokens) == "<bos>1+1?2<eos>2+2?4<eos>"


def test_messages_without_a_template_are_refused(tokenizers):
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat messages need a model with a chat template, and this tokenizer has non"):
        encode_row(tokenizer, {"messages": CHAT})


@pytest.mark.parametrize("field", ["response", "completion", "answer"])
@pytest.mark.parametrize("kind", ["chatml", "gemma"])
def test_a_prompt_and_its_response(tokenizers, field, kind):
    tokenizer = tokenizers(kind)
    text = encode_row(tokenizer, {"prompt": "1+1?", field: "2"})
    assert tokenizer.decode(text.tokens) == (tokenizer.bos_token or "") + "1+1?2" + tokenizer.eos_token
    assert drawn(tokenizer, text) == ["2" + tokenizer.eos_token]
    same = encode_row(tokenizer, {"messages": CHAT[:2]})
    for response in ("2", CHAT[1:2]):
        chat = encode_row(tokenizer, {"prompt": CHAT[:1], field: response})
        assert (chat.tokens, chat.loss_mask, chat.messages) == (same.tokens, same.loss_mask, same.messages)
    # Text without roles that is answered by a message is the user's.
    assert encode_row(tokenizer, {"prompt": "1+1?", field: CHAT[1:2]}).tokens == same.tokens


@pytest.mark.parametrize("kind", ["chatml", "gemma", "roles"])
@pytest.mark.parametrize("written", ["{}", "{}\n", " {} \n"])
def test_a_text_that_has_its_own_end_gets_no_other(tokenizers, kind, written):
    tokenizer = tokenizers(kind)
    text, end = "2" + written, tokenizer.eos_token
    bare = text.partition("{")[0]
    expected = encode_row(tokenizer, {"prompt": "1+1?", "response": bare})
    said = text.format(end)
    talk = {"messages": [CHAT[0], {"role": "assistant", "content": said}]}
    plain = {"messages": [CHAT[0], {"role": "assistant", "content": bare}]}
    for found, same in (
        (encode_row(tokenizer, {"prompt": "1+1?", "response": said}), expected),
        (encode_completion(tokenizer, "1+1?", said), expected),
        *[[encode_row(tokenizer, row, apply_chat_template=False) for row in (talk, plain)]],
    ):
        assert (found.tokens, found.loss_mask) == (same.tokens, same.loss_mask)


@pytest.mark.parametrize("content", ["<think>hm</think>2 is right", "<think>hm</think>", "2</think>\n", "2"])
def test_a_special_token_within_a_turn_is_not_its_end(content):
    tokenizer = bytes_tokenizer("roles")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    for messages, turns in ((chat, 1), ([*chat, *CHAT[2:]], 2)):
        runs = drawn(tokenizer, encode_row(tokenizer, {"messages": messages}))
        assert len(runs) == turns and runs[0].startswith(content.strip())
        assert runs[-1].endswith("<eos>") or content.strip().endswith("</think>")


def test_the_result_of_a_tool_does_not_count(tokenizers):
    tokenizer = tokenizers("chatml")
    messages = [CHAT[0], {"role": "assistant", "content": "call"}, {"role": "tool", "content": "45"}, CHAT[1]]
    assert drawn(tokenizer, encode_row(tokenizer, {"messages": messages})) == ["call<|im_end|>", "2<|im_end|>"]


def test_the_tools_of_a_row_reach_the_template(tokenizers):
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = "{% if tools %}tools: {{ tools[0].name }}\n{% endif %}" + CHATML
    row = {"messages": CHAT[:2], "tools": [{"name": "calculator"}]}
    assert tokenizer.decode(encode_row(tokenizer, row).tokens).startswith("tools: calculator\n<|im_start|>")


def test_a_prompt_that_has_its_own_beginning_is_not_given_another(tokenizers):
    tokenizer = tokenizers("llama3")
    text = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    assert encode_prompt(tokenizer, text) == encode_prompt(tokenizer, CHAT[:1])
    assert encode_prompt(tokenizer, "1+1?")[0] == tokenizer.bos_token_id != encode_prompt(tokenizer, "1+1?")[1]


def test_an_end_of_sequence_that_the_tokenizer_puts_behind_is_left_out_of_a_prompt():
    from tokenizers.processors import TemplateProcessing

    tokenizer = bytes_tokenizer("gemma")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1?")) == "<bos>1+1?"
    assert tokenizer.decode(encode_row(tokenizer, {"prompt": "1+1?", "answer": 2}).tokens) == "<bos>1+1?2<eos>"
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1?<eos>")) == "<bos>1+1?<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "a row has messages, or prompt and one of response, completion, answer; got"),
        ({"response": "a"}, "a row has messages, or prompt and one of"),
        ({"messages": CHAT[:1]}, "the row has no token of the assistant to learn"),
        ({"prompt": "", "answer": "2"}, "a prompt must be text, messages or token ids and not be empty"),
    ],
)
def test_rows_that_teach_nothing(tokenizers, row, message):
    with pytest.raises(ValueError, match=message):
        encode_row(tokenizers("chatml"), row)


def test_a_conversation_may_begin_with_the_assistant(tokenizers):
    trajectory = encode_row(tokenizers("chatml"), {"messages": CHAT[1:2]}, apply_chat_template=False)
    assert trajectory.loss_mask == (False, True)
    assert drawn(tokenizers("chatml"), encode_row(tokenizers("chatml"), {"messages": CHAT[1:2]}))[0].endswith(
        "<|im_end|>"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "the chat template .*t.jinja is empty"),
        (b"\xff", "the chat template .*t.jinja is not UTF-8"),
        (b'{"chat_template": "{{ messages }}"}', "t.jinja is JSON, and a template is Jinja: save the text of its key"),
        (b'[{"role": "user"}]', "t.jinja is JSON, and a template is Jinja: give a template"),
        (b"{% for m in messages %}\n{{ m.content }", "the chat template .*t.jinja, line 2: unexpected '}'"),
    ],
)
def test_a_file_that_is_no_chat_template(tmp_path, text, said):
    file = tmp_path / "t.jinja"
    with pytest.raises(FileNotFoundError, match=r"no such chat template: .*t\.jinja"):
        use_template(bytes_tokenizer("chatml"), file)
    file.write_bytes(text)
    with pytest.raises(ValueError, match=said):
        use_template(bytes_tokenizer("chatml"), file)


def test_a_template_may_refuse_what_no_row_says(tmp_path):
    file, tokenizer = tmp_path / "t.jinja", bytes_tokenizer("chatml")
    file.write_text("{{ raise_exception('a system message is needed') if messages[0].role != 'system' }}")
    use_template(tokenizer, file)
    assert tokenizer.chat_template == file.read_text()


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with a call of its own."""

    def __call__(self, text, **options):
        return super().__call__(text.upper(), **options)


def as_it_is(tokenizer):
    return tokenizer


def truncating(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(2)
    return tokenizer


def padding(tokenizer):
    tokenizer.backend_tokenizer.enable_padding(length=9)
    return tokenizer


def splitting(tokenizer):
    tokenizer.split_special_tokens = True
    return tokenizer


def shouting(tokenizer):
    return Shouting(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)


@pytest.mark.parametrize("change", [as_it_is, truncating, padding, splitting, shouting])
@pytest.mark.parametrize("kind", [*KINDS, "pieces"])
def test_a_text_s_tokens_are_those_of_a_call_of_the_tokenizer(kind, change):
    tokenizers = [change(pieces_tokenizer() if kind == "pieces" else bytes_tokenizer(kind)) for _ in range(2)]
    for text in ("", " the  answer", "What is 12?<|im_end|><eos></s>\n", "<|im_start|>user", "<bos>1+1?"):
        for special in (False, True):
            here, called = tokenizers
            assert _ids(here, text, special) == called(text, add_special_tokens=special).input_ids
