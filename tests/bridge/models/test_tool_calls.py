"""Calls of tools: their form is the chat template's own, or the template is refused."""

import json

import pytest

from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import policy_row, supervised_row
from rl_bridge.models.encoding import encode_prompt, encode_row
from rl_bridge.models.tool_calls import ToolCall, call_form
from tests.support.chat_templates import CHATML, bytes_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("add", "search")
]
SHOWN = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
# Family → how its templates write what the assistant calls.
WRITTEN = {
    "hermes": EACH + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "llama": EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "mistral": "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[TOOL_CALLS] [" + EACH
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
    "list in a tag": "<tool_call>[" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    "nested": EACH + "<call>{{ c | tojson }}</call>",
    "text for arguments": EACH
    + '<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson | tojson }}}</call>',
}  # fmt: skip
CLOSED = {"mistral": "]", "list in a tag": "]</tool_call>"}


def tokenizer_of(written, *, shown=SHOWN):
    """A tokenizer whose template writes calls so."""
    tokenizer = bytes_tokenizer("chatml")
    body = "{% if m.tool_calls %}" + written + "{% else %}{{ m.content }}{% endif %}"
    tokenizer.chat_template = shown + CHATML.replace("{{ m.content }}", body)
    return tokenizer


@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_that_the_template_writes_is_read_back(family):
    tokenizer = tokenizer_of(WRITTEN[family] + "{% endfor %}" + CLOSED.get(family, ""))
    form = call_form(tokenizer, TOOLS)
    arguments = {"text": 'a "quote", ]} <tool and ü\n', "n": [1, 2.5, None, True], "deep": {"x": {}}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = tokenizer.apply_chat_template([turn], tools=TOOLS, tokenize=False)
    said = text.partition("assistant\n")[2].removesuffix("<|im_end|>\n")
    assert form.calls(said) == [ToolCall("search", arguments)]
    assert form.calls("The answer is {3}, or [3].") == []
    if form.mark:
        assert form.calls(f"First I look: {said} and again {said}") == [ToolCall("search", arguments)] * 2


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("inside", ["see {}", '{}{{"name": "add"}}', "{}[1]", "{}"])
def test_a_call_inside_of_an_argument_is_a_text(family, inside):
    """A model that wrote about calls made none: each mark was read as the beginning of one, in texts as well."""
    form = call_form(tokenizer_of(WRITTEN[family] + "{% endfor %}" + CLOSED.get(family, "")), TOOLS)
    arguments = {"text": inside.format(form.mark)}
    call = {form.name[-1]: "add", form.arguments[-1]: arguments}
    if len(form.name) > 1:
        call = {form.name[0]: call}
    assert form.calls(form.mark + json.dumps(call)) == [ToolCall("add", arguments)]


@pytest.mark.parametrize("levels", [1000, 100_000])
@pytest.mark.parametrize("behind", ["", '{"name": ', '{"name": "add", "arguments": '])
def test_a_call_that_is_nested_too_deeply_is_the_policy_s_fault(behind, levels):
    """It ended the conversation as an environment's failure, which costs the policy nothing."""
    hermes, llama = (call_form(tokenizer_of(WRITTEN[name] + "{% endfor %}"), TOOLS) for name in ("hermes", "llama"))
    with pytest.raises(ValueError, match="the call is no JSON"):
        hermes.calls("<tool_call>" + behind + "[" * levels)
    with pytest.raises(ValueError, match="the arguments are no JSON"):
        hermes.calls('<tool_call>{"name": "add", "arguments": "' + "[" * levels + '"}')
    assert llama.calls(behind + "[" * levels) == []


def test_an_answer_in_json_is_no_call():
    form = call_form(tokenizer_of(WRITTEN["llama"] + "{% endfor %}"), TOOLS)
    assert form.mark == "" and form.calls('{"result": 3}') == form.calls("{3, 4}") == []


@pytest.mark.parametrize(
    "call, words",
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "no JSON"),
        ("<tool_call>", "no JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "an object with name and arguments"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "an object with name and arguments"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments are no JSON"),
        ("<tool_call>[3]</tool_call>", "an object with name and arguments"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(call, words):
    form = call_form(tokenizer_of(WRITTEN["hermes"] + "{% endfor %}"), TOOLS)
    with pytest.raises(ValueError, match=words):
        form.calls(call)
    assert form.calls('<tool_call>{"name": "add"}') == [ToolCall("add", {})]


@pytest.mark.parametrize(
    "written, shown, words",
    [
        (WRITTEN["hermes"] + "{% endfor %}", "", r"does not show the model its tools \(add, search\)"),
        ("", SHOWN, "writes the call of a tool as"),
        (EACH + "<function={{ f.name }}>{% endfor %}", SHOWN, "has no JSON of it"),
    ],
    ids=["not shown", "not written", "no JSON"],
)
def test_a_template_without_calls_in_json_is_refused_with_the_way_on(written, shown, words):
    with pytest.raises(ValueError, match=words + r".*converse\(parse=…\)"):
        call_form(tokenizer_of(written, shown=shown), TOOLS)


def bare(number: int):
    return number


def of_no_type(number):
    """Adds.

    Args:
        number: the number.
    """


def of_no_words(number: int):
    """Adds."""


@pytest.mark.parametrize("function", [bare, of_no_type, of_no_words])
def test_a_function_without_words_about_it_is_no_fault_of_the_template(function):
    chat = Chat([{"role": "user", "content": "1+1"}], tools=(function,))
    with pytest.raises(
        ValueError, match=f"a tool that is a function needs a docstring.*{function.__name__}"
    ) as refused:
        encode_prompt(bytes_tokenizer("chatml"), chat)
    assert "template" not in str(refused.value)


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        call_form(tokenizer, TOOLS)


def test_a_generation_prompt_that_opens_a_thought_belongs_to_no_call():
    tokenizer = tokenizer_of(WRITTEN["hermes"] + "{% endfor %}")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    form = call_form(tokenizer, TOOLS)
    assert form.mark == "<tool_call>"
    assert form.calls("</think>" + json.dumps({"name": "add", "arguments": {}})) == []


# DeepSeek's templates write calls beside the content None alone: an empty one is an answer without words.
NULL = {
    "is none": "m.content is none",
    "equals none": "m.content == None",
    "no text": "m.content is not string",
    "added to a text": "('' + m.content if m.content is not none else none) is none",
}
CALLING = {
    "objects": "{{ f.name }}|{{ f.arguments | tojson }}",
    "texts": "{{ f.name + '|' + f.arguments }}",
}
CONTENTS = {"null": {"content": None}, "empty": {"content": ""}, "absent": {}}


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}', {}], ids=["object", "text", "none"])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("written", CALLING)
@pytest.mark.parametrize("condition", NULL)
def test_a_call_beside_null_content_is_written_as_the_template_does(condition, written, content, arguments):
    calls = "{% for c in m.tool_calls %}{% set f = c.function %}<call>" + CALLING[written] + "</call>{% endfor %}"
    body = "{% if " + NULL[condition] + " %}" + calls + "{% else %}{{ m.content }}{% endif %}"
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", body)
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    user, told = {"role": "user", "content": "q"}, {"role": "tool", "content": "3"}
    called = {"role": "assistant", **CONTENTS[content], "tool_calls": [call]}
    as_object = json.loads(arguments) if isinstance(arguments, str) else arguments
    expected = f"<call>weather|{json.dumps(as_object)}</call><|im_end|>"
    trained = encode_row(tokenizer, supervised_row({"messages": [user, called]}))
    assert expected in tokenizer.decode([t for t, m in zip(trained.tokens, trained.loss_mask, strict=True) if m])
    for behind in ([], [told], [told, {"role": "assistant", "content": "3"}, user]):
        prompt = Chat.of(policy_row({"messages": [user, called, *(behind or [user])]}))
        assert tokenizer.decode(encode_prompt(tokenizer, prompt)).count(expected) == 1
