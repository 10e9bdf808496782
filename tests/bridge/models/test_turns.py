import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_bridge.data.messages import Chat
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate, UnusableTemplate

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Consecutive tools share one turn of the user, as in Qwen's templates.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if tools %}<start_of_turn>user\n{{ tools | tojson }}<end_of_turn>\n{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Drops what stands before </think> in all turns before the last message of the user, as reasoning models' do.
FORGETS = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 < last.user %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen": (QWEN, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
}
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
TOOLS = ({"type": "function", "function": {"name": "add", "description": "a+b", "parameters": {}}},)
# Line ends, spaces and brackets at the borders of a message are where tokens of two texts could melt into one.
CORPUS = [
    "\n\n\n 12 + 34 =\n",
    "tool\n\nuser\nmodel\n\n",
    "<tool_response>\n46\n</tool_response>\n",
    " \n {a}: \n\n",
] * 9
SAID = st.text(alphabet="ab1+ \n<>", max_size=12)


def new_tokenizer(template, eos):
    """Byte-pair merges across line ends and brackets, as the tokenizers of real models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s*\w+|\W+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 9, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    return fast


TOKENIZERS = {name: new_tokenizer(*of) for name, of in TEMPLATES.items()}


def message(role, content):
    return {"role": role, "content": content}


def whole(tokenizer, said, tools):
    """The template's own rendering, encoded at once."""
    return tokenizer.apply_chat_template(said, tools=tools or None, add_generation_prompt=True, return_dict=False)


def test_the_tokenizers_merge_over_line_ends():
    tokenizer = TOKENIZERS["chatml"]
    assert len(tokenizer("\n\n").input_ids) == 1 and len(tokenizer(">\n").input_ids) == 1


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    system=st.booleans(),
    tools=st.booleans(),
    question=SAID,
    turns=st.lists(st.tuples(SAID, st.lists(SAID, min_size=1, max_size=2), st.sampled_from(["tool", "user"]))),
)
def test_the_tokens_are_the_template_s_own_where_the_policy_s_text_round_trips(name, system, tools, question, turns):
    tokenizer, tools = TOKENIZERS[name], TOOLS if tools else ()
    template = TurnTemplate(tokenizer)
    said = [message("system", "Be\n\n")] if system else []
    said += [message("user", question)]
    tokens, drawn = template.opening(Chat(said, tools)), []
    assert tokens == whole(tokenizer, said, tools)
    for words, answers, role in turns:
        # Templates that trim do so to the policy's words too: such text does not round-trip.
        words = words.strip() if name in ("llama", "gemma") else words
        header = tokenizer.apply_chat_template(said, tools=tools or None, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(words, add_special_tokens=False).input_ids
        if tokenizer(header + words, add_special_tokens=False).input_ids != tokens + ids:
            return  # its first token would melt with the header's last: the policy drew other tokens than the text's
        drawn.append(len(said))
        said.append(message("assistant", words))
        answer = [message(role, text) for text in answers]
        tokens = [*tokens, *ids, tokenizer.eos_token_id, *template.between(Chat(said, tools), drawn, answer)]
        said += answer
        assert tokens == whole(tokenizer, said, tools)


def test_what_the_policy_says_changes_nothing_behind_it():
    for tokenizer in TOKENIZERS.values():
        template, answer = TurnTemplate(tokenizer), [message("tool", "46")]
        words = ["", "turn0", "<|im_end|>\n", "  spaces  ", "<think>x</think>", "{{ evil }}", "\ud83d"]
        found = {tuple(template.between([message("user", "q"), message("assistant", w)], [1], answer)) for w in words}
        assert len(found) == 1


def test_the_line_end_between_a_turn_and_a_tool_is_there():
    tokenizer = TOKENIZERS["chatml"]
    said = [message("user", "q"), message("assistant", "x")]
    given_tokens = TurnTemplate(tokenizer).between(said, [1], [message("tool", "4")])
    assert tokenizer.decode(given_tokens) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_forgets_reasoning_is_explained_and_fits_where_it_only_adds():
    template = TurnTemplate(new_tokenizer(FORGETS, "<|im_end|>"))
    said = [message("user", "q"), message("assistant", "4")]
    assert template.between(said, [1], [message("tool", "4")])
    with pytest.raises(
        UnusableTemplate, match=r"changes what stands before.*user after the policy's.*<think>.*becomes"
    ):
        template.between(said, [1], [message("user", "why?")])


@pytest.mark.parametrize(
    "template, eos, cause",
    [
        (CHATML, "<|eot_id|>", r"ends the policy's turn with '<\|im_end\|>.*stops at '<\|eot_id\|>'"),
        (CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"), "<|im_end|>", r"changes what stands before"),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}"),
            "<|im_end|>",
            r"changes what stands before",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
            + CHATML,
            "<|im_end|>",
            r"refuses messages of the roles user, assistant, tool: no tools",
        ),
    ],
    ids=["end", "generation prompt", "shortens", "role"],
)
def test_a_template_that_no_conversation_can_go_on_with_is_explained(template, eos, cause):
    turns = TurnTemplate(new_tokenizer(template, eos))
    with pytest.raises(UnusableTemplate, match=cause):
        turns.between([message("user", "q"), message("assistant", "4")], [1], [message("tool", "4")])


def test_a_turn_may_end_with_any_token_at_which_sampling_stops():
    tokenizer = new_tokenizer(CHATML, "<|eot_id|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said, answer = [message("user", "q"), message("assistant", "4")], [message("tool", "4")]
    found = TurnTemplate(tokenizer, stops=[end]).between(said, [1], answer)
    assert found == TurnTemplate(TOKENIZERS["chatml"]).between(said, [1], answer)


def test_without_a_template_contents_follow_one_another():
    tokenizer = character_tokenizer("0123456789+=")
    template = TurnTemplate(tokenizer)
    assert template.opening([message("system", "12"), message("user", "+3=")]) == tokenizer("12+3=").input_ids
    said = [message("user", "12+3="), message("assistant", "5")]
    assert template.between(said, [1], [message("tool", "+15")]) == tokenizer("+15").input_ids
    with pytest.raises(ValueError, match="have no token"):
        template.between(said, [1], [message("tool", "")])


def test_tools_are_the_template_s():
    tokenizer = TOKENIZERS["chatml"]
    text = tokenizer.decode(TurnTemplate(tokenizer).opening(Chat([message("user", "q")], TOOLS)))
    assert json.dumps(TOOLS[0]) in text


def test_a_run_can_ask_beforehand_whether_conversations_can_go_on():
    for tokenizer in TOKENIZERS.values():
        assert TurnTemplate(tokenizer).refusal(("tool",)) is None
        assert TurnTemplate(tokenizer).refusal(("tool", "user"), opening=("system", "user")) is None
    forgets = TurnTemplate(new_tokenizer(FORGETS, "<|im_end|>"))
    assert forgets.refusal(("tool",)) is None
    (place,) = re.findall(r"user after the policy's turn\): from token (\d+) on, ", forgets.refusal(("user",)))
    # <|im_start|>user⏎user<|im_end|>⏎<|im_start|>assistant⏎ stands before the reasoning that is forgotten.
    before = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\n"
    assert abs(int(place) - len(forgets._encoded(before))) <= 1
