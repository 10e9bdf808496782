"""A message is compared in the text that the model reads, and chats of unlike forms share no answer.

Templates decide by a message what they write elsewhere, as in the generation prompt alone.
"""

import copy
import itertools
import pickle

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import policy_row, supervised_row
from rl_bridge.models.chat_templates import memory_of
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.left_out import LeftOut
from rl_bridge.models.row_checks import remark_on_conversations, remark_on_prompts
from rl_bridge.models.turn_template import TurnTemplate
from tests.support.chat_templates import bytes_tokenizer

ASK, SAYS = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "the answer is 12"}
THINKS = {"role": "assistant", "content": "<think></think>the answer is 12"}


BYTES = bytes_tokenizer("chatml")


def tokenizer_of(template, **tokens):
    tokenizer = copy.deepcopy(BYTES)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens(tokens)
    return tokenizer


def outcome(encode, *arguments):
    """The tokens, or the words of the refusal."""
    try:
        return list(encode(*arguments))
    except ValueError as error:
        return str(error)


# Where a switch is read: (of which message's words, what the template does with that message itself).
READ = {
    "a system message": ("messages[0].content", "m.role != 'system'"),
    "the last message": ("messages[-1].content", "'/quiet' not in m.content and '/loud' not in m.content"),
    "any message": (
        "messages | map(attribute='content') | join",
        "m.role in ('user', 'assistant') and '/quiet' not in m.content and '/loud' not in m.content",
    ),
}
# Where its effect is written.
EFFECTS = {
    "generation prompt": ("", "{% if quiet %}<think></think>{% endif %}"),
    "beginning": ("{% if quiet %}<|im_start|>brief<|im_end|>{% endif %}", ""),
    "nowhere": ("", ""),
}
SWITCHED = {
    "system": [{"role": "system", "content": "/quiet"}, ASK],
    "system, off": [{"role": "system", "content": "/loud"}, ASK],
    "user": [ASK, {"role": "user", "content": "/quiet"}],
    "user, off": [ASK, {"role": "user", "content": "/loud"}],
    "later": [ASK, SAYS, {"role": "user", "content": "/quiet"}],
    "other system message": [{"role": "system", "content": "/quiet"}, ASK, SAYS, ASK],
}
CASES = list(itertools.product(READ, EFFECTS, SWITCHED))


def switching(read, effect):
    words, writes = READ[read]
    before, behind = EFFECTS[effect]
    return (
        f"{{% set quiet = '/quiet' in ({words}) %}}" + before + f"{{% for m in messages if {writes} %}}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + behind + "{% endif %}"
    )


def matters(tokenizer, prompt, place, other="words that no template knows"):
    """Whether the model reads another prompt with other words in a message."""
    changed = [m | {"content": other} if n == place else m for n, m in enumerate(prompt)]
    texts = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in (prompt, changed)
    )
    return next(texts) != next(texts)


@pytest.mark.parametrize("read, effect, name", CASES)
def test_a_message_of_a_prompt_is_refused_where_the_model_reads_the_same_without_and_nowhere_else(read, effect, name):
    tokenizer, prompt = tokenizer_of(switching(read, effect)), SWITCHED[name]
    others = (place for place, m in enumerate(prompt) if m["role"] != "assistant")
    lost = next((place for place in others if not matters(tokenizer, prompt, place)), None)
    words = None if lost is None else f"leaves out message {lost} ({prompt[lost]['role']}) wholly"
    for encode in (encode_prompt, lambda tokenizer, prompt: TurnTemplate(tokenizer).opening(prompt)):
        for _ in range(2):  # a form of chat is remembered
            result = outcome(encode, tokenizer, prompt)
            assert words in result if words else isinstance(result, list)
    remark_on_prompts(tokenizer, [policy_row({"prompt": prompt})])
    assert bool(remarks()) == (lost is not None)


@pytest.mark.parametrize("read, effect, name", CASES)
def test_a_row_to_imitate_is_refused_as_its_prompt_is(read, effect, name):
    """The reply has the words with which the prompt of a quiet one ends, so the switch changes no token of the row."""
    tokenizer, prompt = tokenizer_of(switching(read, effect)), SWITCHED[name]
    of_prompt = outcome(encode_prompt, tokenizer, prompt)
    if not all(m["role"] == "assistant" or matters(tokenizer, prompt, place) for place, m in enumerate(prompt)):
        assert "wholly" in of_prompt
    row = supervised_row({"prompt": prompt, "response": [THINKS]})
    result = outcome(lambda: encode_row(tokenizer, row).tokens)
    if isinstance(of_prompt, str):
        assert result == of_prompt or "changes earlier tokens" in result
    elif isinstance(result, str):
        assert "changes earlier tokens" in result
    else:
        trajectory = encode_completion(tokenizer, prompt, [THINKS])
        assert list(trajectory.tokens)[: len(of_prompt)] == of_prompt
        remark_on_conversations(tokenizer, [row])
        assert remarks() == []


def test_a_message_that_is_written_where_something_follows_is_in_the_prompt():
    template = (
        "{% for m in messages %}{% if add_generation_prompt or not loop.last %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    shouts = {"role": "user", "content": "a & b?"}
    for prompt in ([shouts], [{"role": "developer", "content": "brief & good"}, shouts], [ASK, SAYS, shouts]):
        assert "a & b?" in tokenizer.decode(encode_prompt(tokenizer, prompt))
        assert TurnTemplate(tokenizer).opening(prompt) == encode_prompt(tokenizer, prompt)
        remark_on_prompts(tokenizer, [policy_row({"prompt": prompt})])
        assert remarks() == []
    tokenizer.chat_template = template.replace("m.content }}", "m.content | e }}")  # the words are in other characters
    assert "a &amp; b?" in tokenizer.decode(encode_prompt(tokenizer, [shouts]))


# What a template may read beside the words: (the condition under which it writes a message, a chat with and without).
BESIDE = [{"role": "developer", "content": "is it"}, ASK]


def chat(*, tools=(), arguments=None, ask=(), **keys):
    return Chat([BESIDE[0] | keys, ASK | dict(ask)], tools, arguments or {})


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def call(name):
    return [{"type": "function", "function": {"name": name, "arguments": {}}}]


CONDITIONS = {
    "a name": ("m.name == 'a'", chat(name="a"), chat(name="b")),
    "another message's name": ("messages[1].name == 'a'", chat(ask={"name": "a"}), chat(ask={"name": "b"})),
    "a call": ("m.tool_calls[0].function.name == 'f'", chat(tool_calls=call("f")), chat(tool_calls=call("g"))),
    "number of calls": ("m.tool_calls | length == 2", chat(tool_calls=call("f") * 2), chat(tool_calls=call("f"))),
    "number of tools": ("tools | length == 2", chat(tools=[tool("f"), tool("g")]), chat(tools=[tool("f")])),
    "a tool": ("tools and tools[0].function.name == 'f'", chat(tools=[tool("f")]), chat(tools=[tool("g")])),
    "a tool's schema": (
        "tools and tools[0].function.parameters.x",
        chat(tools=[{"function": {"name": "f", "parameters": {"x": 1}}}]),
        chat(tools=[tool("f")]),
    ),
    "a variable": ("mood == 'brief'", chat(arguments={"mood": "brief"}), chat(arguments={"mood": "long"})),
    "a document": (
        "documents[0].text == 'a'",
        chat(arguments={"documents": [{"title": "", "text": "a"}]}),
        chat(arguments={"documents": [{"title": "", "text": "b"}]}),
    ),
    "an empty content": (
        "messages[2].content",
        Chat([*BESIDE, SAYS, ASK]),
        Chat([*BESIDE, SAYS | {"content": ""}, ASK]),
    ),
    "no content": (
        "messages[2].content is not none",
        Chat([*BESIDE, SAYS | {"content": ""}, ASK]),
        Chat([*BESIDE, SAYS | {"content": None}, ASK]),
    ),
}
TOKENS = {"bos_token": ("<bos>", "<s>"), "eos_token": ("<|im_end|>", "</s>"), "unk_token": ("<unk>", "<?>")}


def conditional(condition):
    return (
        f"{{% for m in messages if m.role != 'developer' or ({condition}) %}}<|im_start|>{{{{ m.role }}}}\n"
        "{{ m.content or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", CONDITIONS)
def test_an_answer_that_is_remembered_is_that_of_a_new_tokenizer(name, order):
    """The message's words stand in another message too, so only the remembered form tells that it is not written."""
    condition, *chats = CONDITIONS[name]
    shared = tokenizer_of(conditional(condition))
    results = []
    for one in (*chats[::order], *chats[::order]):
        results.append(outcome(encode_prompt, shared, one))
        assert results[-1] == outcome(encode_prompt, tokenizer_of(conditional(condition)), one)
    written, dropped = results[:2][::order]
    assert isinstance(written, list) and "message 0 (developer) wholly" in dropped
    assert len(memory_of(shared, "forms")) == 2


@pytest.mark.parametrize("token", TOKENS)
def test_an_answer_of_other_special_tokens_is_looked_for_again(token):
    first, second = TOKENS[token]
    tokenizer = tokenizer_of(conditional(f"{token} == '{first}'"), **{token: first})
    assert encode_prompt(tokenizer, BESIDE)
    tokenizer.add_special_tokens({token: second})
    with pytest.raises(LeftOut):
        encode_prompt(tokenizer, BESIDE)


def test_the_memory_of_a_tokenizer_stays_with_it_and_is_small():
    tokenizer = tokenizer_of(conditional("mood"))
    size, names = len(pickle.dumps(tokenizer)), set(vars(tokenizer))
    encode_prompt(tokenizer, [ASK])
    clock = len(pickle.dumps(tokenizer)) - size  # the moment that templates write
    for number in range(50):
        encode_prompt(tokenizer, Chat(BESIDE, (), {"mood": str(number) * 20_000}))
        encode_prompt(tokenizer, [{"role": "user", "content": f"{number}+{number}?"}, SAYS, ASK])
    assert len(pickle.dumps(tokenizer)) == size + clock < size + 500
    assert set(vars(tokenizer)) - names <= {"template_clock"}
    forms = memory_of(tokenizer, "forms")
    assert len(forms) == 1 + 50 + 1, "plain chats of other words are of one form"
    assert all(isinstance(form, bytes) and len(form) <= 32 for form in forms)
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert memory_of(copied, "forms") == {}


def test_a_tokenizer_that_no_dictionary_holds_is_read_without_a_memory():
    tokenizer = tokenizer_of(conditional("mood"))
    kind = type("Compared", (type(tokenizer),), {"__eq__": lambda self, other: self is other})
    tokenizer.__class__ = kind
    assert kind.__hash__ is None
    assert encode_prompt(tokenizer, Chat(BESIDE, (), {"mood": "brief"}))
    with pytest.raises(LeftOut):
        encode_prompt(tokenizer, BESIDE)
