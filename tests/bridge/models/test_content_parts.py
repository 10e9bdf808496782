"""A template that goes through a content part by part gets each text as a part, wherever a conversation is rendered."""

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.comparisons import comparison_of
from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import policy_row, supervised_row
from rl_bridge.loop.encoded import remark_on_unread
from rl_bridge.models.chat_templates import rendered
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.left_out import LeftOut
from rl_bridge.models.row_checks import remark_on_conversations, remark_on_prompts
from rl_bridge.models.turn_ends import stop_tokens
from rl_bridge.models.turn_template import TurnTemplate
from tests.support.chat_templates import KINDS, bytes_tokenizer, tokenizer_with

BYTES = bytes_tokenizer("chatml")
TEXT = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


def twin(content):
    return TEXT.replace("{{ m.content }}", content)


EACH = "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
# Template → the same one with texts for contents, which is given texts.
TEMPLATES = {
    "SmolVLM": (
        "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}"
        "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
        "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        TEXT.replace("Assistant: {%", "Assistant:{%"),
    ),
    "selected": (
        twin("{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"),
        TEXT,
    ),
    "the first part": (twin("{{ m['content'][0]['text'] + '' }}"), TEXT),
    "a text of the system": (twin("{% if m.role == 'system' %}{{ m.content }}{% else %}" + EACH + "{% endif %}"), TEXT),
    "a text of the assistant": (
        twin("{% if m.role == 'assistant' %}{{ m.content }}{% else %}{{ m['content'][0]['text'] + '' }}{% endif %}"),
        TEXT,
    ),
    "a text of a tool": (twin("{% if m.role == 'tool' %}{{ m.content }}{% else %}" + EACH + "{% endif %}"), TEXT),
    "parts of the user": (twin("{% if m.role == 'user' %}" + EACH + "{% else %}{{ m.content }}{% endif %}"), TEXT),
    "both": (twin("{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}"), TEXT),
    "calls": (
        twin(EACH + "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"),
        twin("{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"),
    ),
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
PROMPTS = {
    "user": [{"role": "user", "content": "What is it?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1? <start>"}],
    "turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "What 'is' it? {'type': 'text'}"},
    ],
    "tool": [
        {"role": "user", "content": "f?"},
        {"role": "assistant", "content": "f"},
        {"role": "tool", "content": "2"},
    ],
    "empty": [{"role": "system", "content": ""}, {"role": "user", "content": " 1"}],
}
SAYS = {"role": "assistant", "content": "the answer is 12"}


def outcome(encode, tokenizer):
    """The tokens, or the words of the refusal."""
    try:
        return encode(tokenizer)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_encoder_writes_what_the_template_of_texts_writes(name, prompt):
    tokenizer, texts = map(tokenizer_with, TEMPLATES[name])
    messages = PROMPTS[prompt]
    in_parts = [m | {"content": [{"type": "text", "text": piece} for piece in m["content"]]} for m in messages]
    called = [*messages, *([CALL, {"role": "tool", "content": "3"}] if name == "calls" else [])]
    encoders = {
        "prompt": lambda t: encode_prompt(t, policy_row({"prompt": messages})["prompt"]),
        "row in parts": lambda t: encode_prompt(t, policy_row({"prompt": in_parts})["prompt"]),
        "calls": lambda t: encode_prompt(t, policy_row({"prompt": called})["prompt"]),
        "imitated": lambda t: encode_row(t, supervised_row({"messages": [*messages, SAYS]})),
        "compared": lambda t: encode_completion(t, comparison_of(PAIR | {"prompt": messages}).prompt, "45"),
        "opening": lambda t: TurnTemplate(t).opening(messages),
        "turn": lambda t: TurnTemplate(t).between([*messages, SAYS], [len(messages)], messages[-1:]),
        "stops": lambda t: stop_tokens(MODEL, t),
        "unread": lambda t: remark_on_unread(t, [comparison_of(PAIR | {"prompt": messages})], True),
        "prompts": lambda t: remark_on_prompts(t, [policy_row({"prompt": messages})]),
        "rows": lambda t: remark_on_conversations(t, [supervised_row({"messages": [*messages, SAYS]})]),
    }
    for what, encode in encoders.items():
        assert outcome(encode, tokenizer) == outcome(encode, texts), what
        assert remarks() == [], what
    assert tokenizer.decode(encoders["prompt"](tokenizer)).rstrip().endswith("Assistant:")
    # Between turns the own space of SmolVLM's generation prompt is not that of a turn.
    assert isinstance(outcome(encoders["turn"], tokenizer), str) == (name == "SmolVLM")


PAIR = {"chosen": "12", "rejected": "45"}
MODEL = type("Model", (), {"generation_config": None})()


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool", "critic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_writes_texts_is_given_texts(kind, role):
    tokenizer = bytes_tokenizer(kind)
    chat = Chat([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert rendered(tokenizer, chat, generation_prompt=True) == tokenizer.apply_chat_template(
        chat.prompt, tokenize=False, add_generation_prompt=True
    )


def test_the_template_that_the_tokenizer_has_now_is_tried():
    parts, texts = TEMPLATES["SmolVLM"]
    tokenizer = tokenizer_with(parts)
    words = rendered(tokenizer, PROMPTS["user"], generation_prompt=True)
    tokenizer.chat_template = texts
    assert rendered(tokenizer, PROMPTS["user"], generation_prompt=True) == words
    tokenizer.chat_template = parts
    assert rendered(tokenizer, PROMPTS["user"], generation_prompt=True) == words


def test_a_message_that_a_template_of_parts_leaves_out_is_refused():
    tokenizer = tokenizer_with(twin("{% if m.role != 'developer' %}" + EACH + "{% endif %}"))
    prompt = [{"role": "developer", "content": "is it"}, *PROMPTS["user"]]
    for encode in (encode_prompt, lambda tokenizer, prompt: TurnTemplate(tokenizer).opening(prompt)):
        with pytest.raises(LeftOut, match=r"message 0 \(developer\) wholly.*; give it the role 'system' or 'user'"):
            encode(tokenizer, prompt)


def test_a_part_that_a_turn_loses_is_refused():
    tokenizer = tokenizer_with(
        TEMPLATES["SmolVLM"][0].replace("{{line['text']}}", "{{line['text'].split('</t>')[-1]}}")
    )
    lost = {"role": "assistant", "content": "<t>why</t>12"}
    with pytest.raises(ValueError, match=r"leaves out 10 characters of .* in message 1, which is trained on: '<t>why"):
        encode_row(tokenizer, supervised_row({"messages": [*PROMPTS["user"], lost]}))
