"""Every word of a message is in the tokens, or is named; a turn that is trained on is trained on as it stands.

A message of somebody else that is not in the tokens at all is refused.
"""

import contextlib
import itertools

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.comparisons import comparison_of
from rl_bridge.data.rows import policy_row, supervised_row
from rl_bridge.loop.encoded import remark_on_unread
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.left_out import LeftOut
from rl_bridge.models.row_checks import remark_on_conversations, remark_on_prompts
from rl_bridge.models.turn_template import TurnTemplate
from tests.support.chat_templates import CHATML, GEMMA, LLAMA3, THOUGHTS, bytes_tokenizer

BESIDE = "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
ROLES = CHATML.replace("<|im_start|>{{", "{% if m.role in ('user', 'assistant') %}<|im_start|>{{", 1)


def nothing(message):
    return ""


def thoughts(message):
    """What stands before the last </think> of an assistant's content, with it."""
    before, mark, _ = message["content"].rpartition("</think>")
    return before + mark if message["role"] == "assistant" else ""


def blocks(message):
    parts = message["content"].split("<think>")
    return "".join(f"<think>{part.split('</think>')[0]}</think>" for part in parts[1:])


# Template → (its text, what it leaves out of a message).
TEMPLATES = {
    "all": (CHATML, nothing),
    "trimmed": (LLAMA3, nothing),
    "as JSON": (CHATML.replace("m.content", "m.content | tojson"), nothing),
    "escaped": (CHATML.replace("m.content", "m.content | e"), nothing),
    "in capitals": (CHATML.replace("m.content", "m.content | upper"), nothing),
    "no thoughts": (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), thoughts),
    "no blocks": (
        CHATML.replace(
            "{{ m.content }}",
            "{% for part in m.content.split('<think>') %}{{ part.split('</think>')[-1] }}{% endfor %}",
        ),
        blocks,
    ),
    "two roles": (
        ROLES.replace("<|im_end|>\n", "<|im_end|>\n{% endif %}", 1),
        lambda message: "" if message["role"] in ("user", "assistant") else message["content"],
    ),
    "call alone": (
        CHATML.replace("{{ m.content }}", BESIDE),
        lambda message: message["content"] if message.get("tool_calls") else "",
    ),
    "no sign": (
        CHATML.replace("{{ m.content }}", "{{ m.content | replace('<image>', '') }}"),
        lambda message: "<image>" * message["content"].count("<image>"),
    ),
}
CALL = [{"function": {"name": "f", "arguments": {}}}]
BEGINNINGS = {
    "user": [],
    "system": [{"role": "system", "content": "Be brief.\n"}],
    "developer": [{"role": "developer", "content": "user"}],
    "same words": [{"role": "developer", "content": "What is it?"}],
    "call": [
        {"role": "user", "content": "f?"},
        {"role": "assistant", "content": "I think, so I call", "tool_calls": CALL},
        {"role": "tool", "content": "12"},
    ],
}
SAID = {
    "plain": "the answer is 12",
    "quoted": 'say "12" &\n\tgo',
    "thought": "<think>a long reason</think>12",
    "two thoughts": "<think>a</think>1 <think>b </think>2",
    "sign": "<image> 12",
}
CASES = list(itertools.product(TEMPLATES, BEGINNINGS))


@pytest.fixture(scope="module")
def tokenizer_of():
    made = {}

    def of(name):
        if name not in made:
            made[name] = bytes_tokenizer("llama3" if name == "trimmed" else "chatml")
            made[name].chat_template = TEMPLATES[name][0]
        return made[name]

    return of


def squeezed(text):
    return "".join(text.split())


def lost_by_role(name, messages):
    """Role → characters that the template leaves out of a conversation, white space aside."""
    lost = {}
    for message in messages:
        if words := squeezed(TEMPLATES[name][1](message)):
            lost[message["role"]] = lost.get(message["role"], 0) + len(words)
    return lost


def lost_wholly(name, messages):
    """The first message of anybody but the assistant that the template leaves out wholly: (place, role), if any."""
    others = ((place, m) for place, m in enumerate(messages) if m["role"] != "assistant" and m["content"].strip())
    lost = (
        (place, m["role"]) for place, m in others if squeezed(TEMPLATES[name][1](m)) == squeezed(m["content"]) != ""
    )
    return next(lost, None)


def refuses(first):
    """A message of this place and role is refused; nothing, where there is none."""
    if first is None:
        return contextlib.nullcontext()
    words = (
        rf"leaves out message {first[0]} \({first[1]}\) wholly, so the model would read another prompt than the row's"
    )
    return pytest.raises(ValueError, match=rf"{words}: .*; give it the role ('system' or )?'user'")


def refuses_call(name, messages):
    """The first call that the template does not write, where there is one."""
    place = next((place for place, m in enumerate(messages) if m.get("tool_calls") and name != "call alone"), None)
    words = rf"leaves out the call 'f' with {{}} of message {place} \(assistant\), which is trained on"
    return contextlib.nullcontext() if place is None else pytest.raises(ValueError, match=words)


def named():
    """Role → (characters, rows with them, rows) of the remarks."""
    lines = [line.split(" leaves out ")[1].split() for line in remarks() if " leaves out " in line]
    return {words[4]: (int(words[0]), int(words[7]), int(words[9])) for words in (line for line in map(tuple, lines))}


@pytest.mark.parametrize("name, beginning", CASES)
def test_what_a_template_leaves_out_is_refused_where_it_is_trained_on_and_named_elsewhere(
    tokenizer_of, name, beginning
):
    for said in SAID:
        check_conversation(tokenizer_of(name), name, beginning, said)


def check_conversation(tokenizer, name, beginning, said):
    prompt = [*BEGINNINGS[beginning], {"role": "user", "content": "What is it?"}]
    messages = [*prompt, {"role": "assistant", "content": SAID[said]}]
    row = supervised_row({"messages": messages})
    lost = lost_by_role(name, messages)
    remark_on_conversations(tokenizer, [row, row])
    assert {role: (count, rows) for role, (count, rows, _) in named().items()} == {
        role: (2 * count, 2) for role, count in lost.items()
    }
    if lost_wholly(name, messages):
        with refuses(lost_wholly(name, messages)):
            encode_row(tokenizer, row)
    elif count := lost.get("assistant"):
        first = next(place for place, m in enumerate(messages) if lost_by_role(name, [m]).get("assistant"))
        number = lost_by_role(name, [messages[first]])["assistant"]
        words = f"leaves out {number} characters of .* in message {first}, which is tra"
        before = [m for m in messages[:first] if m.get("tool_calls") and name != "call alone"]
        with refuses_call(name, messages) if before else pytest.raises(ValueError, match=words):
            encode_row(tokenizer, row)
        assert count >= number
    else:
        with refuses_call(name, messages):
            encode_row(tokenizer, row)
    with refuses(lost_wholly(name, messages)) if lost_wholly(name, messages) else refuses_call(name, messages):
        encode_row(tokenizer, row, to_end=True)
    encode_row(tokenizer, row, to_end=True, require_messages=False)  # another's reward model is read as elsewhere
    untrained = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]
    ended = [*untrained, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "2"}]
    with refuses(lost_wholly(name, prompt)):
        encode_row(tokenizer, supervised_row({"messages": ended}))
    with refuses(lost_wholly(name, prompt)):
        encode_prompt(tokenizer, prompt)
    with refuses(lost_wholly(name, prompt)):
        TurnTemplate(tokenizer).opening(prompt)
    remark_on_prompts(tokenizer, [policy_row({"prompt": prompt}), policy_row({"prompt": "1+1="})])
    assert named() == {role: (count, 1, 2) for role, count in lost_by_role(name, prompt).items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_completions_of_a_pair_are_trained_on_and_its_prompt_is_not(tokenizer_of, name):
    for said in SAID:
        check_pair(tokenizer_of(name), name, said)


def check_pair(tokenizer, name, said):
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID["thought"]}]
    prompt = [*prompt, {"role": "user", "content": "So?"}]
    pair = comparison_of({"prompt": prompt, "chosen": SAID[said], "rejected": "45"})
    remark_on_unread(tokenizer, [pair], True)
    both = [*prompt, {"role": "assistant", "content": SAID[said]}]
    assert {role: count for role, (count, _, _) in named().items()} == lost_by_role(name, both)
    rejected = encode_completion(tokenizer, pair.prompt, "45")
    counted = tokenizer.decode([t for t, m in zip(rejected.tokens, rejected.loss_mask, strict=True) if m])
    assert "45" in counted and len(counted) < 20
    if lost_by_role(name, both[-1:]):
        with pytest.raises(ValueError, match=r"in message 3, which is trained on"):
            encode_completion(tokenizer, pair.prompt, SAID[said])
    else:
        chosen = encode_completion(tokenizer, pair.prompt, SAID[said])
        assert chosen.messages == tuple(both)
    remark_on_unread(tokenizer, [pair], False)
    assert named() == {}


def test_thoughts_that_only_earlier_turns_lose_are_named_and_those_of_the_last_one_are_trained():
    tokenizer = bytes_tokenizer("thoughts")
    assert tokenizer.chat_template == THOUGHTS
    thought = {"role": "assistant", "content": SAID["thought"]}
    question = {"role": "user", "content": "?"}
    last = encode_row(tokenizer, {"messages": [question, thought]})
    assert SAID["thought"] in tokenizer.decode(last.tokens)
    remark_on_prompts(tokenizer, [{"prompt": [question, thought, question], "_where": "a, row 1"}])
    (line,) = remarks()
    assert "leaves out 26 characters of what assistant says in 1 of 1 rows: first a, row 1, '<think>alongreaso" in line


def test_a_row_that_the_template_refuses_is_no_remark():
    tokenizer = bytes_tokenizer("gemma")
    assert tokenizer.chat_template == GEMMA
    remark_on_prompts(tokenizer, [{"prompt": [{"role": "system", "content": "a"}]}])
    assert remarks() == []


# What families' templates do with a message: (template, what the message says, in which place, whether it is refused).
FIRST = (
    "{% if messages[0].role == 'system' %}<sys>{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
)
FIRST_ALONE = FIRST + ROLES.replace("<|im_end|>\n", "<|im_end|>\n{% endif %}", 1)
LAST_USER = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.last %}{{ system }}{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
SWITCH = (
    "{% set quiet = messages[0].role == 'system' and '/quiet' in messages[0].content %}"
    "{% if messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content.replace('/quiet', '').replace('/loud', '') }}<|im_end|>\n"
    "{% set messages = messages[1:] %}{% endif %}" + CHATML + "{% if quiet %}<think></think>{% endif %}"
)
READ_ALONE = (
    "{% set quiet = messages[0].role == 'system' and '/quiet' in messages[0].content %}"
    + ROLES.replace("<|im_end|>\n", "<|im_end|>\n{% endif %}", 1)
    + "{% if quiet %}<think></think>{% endif %}"
)
ASK = {"role": "user", "content": "What is it?"}
FAMILIES = {
    "a system message of its own place": (FIRST_ALONE, [{"role": "system", "content": "Be brief."}, ASK], None),
    "a second system message": (FIRST_ALONE, [*2 * [{"role": "system", "content": "Be brief."}], ASK], (1, "system")),
    "a developer's message": (FIRST_ALONE, [{"role": "developer", "content": "Be brief."}, ASK], (0, "developer")),
    "words that stand elsewhere": (FIRST_ALONE, [{"role": "developer", "content": "is it"}, ASK], (0, "developer")),
    "a system message in the last turn": (LAST_USER, [{"role": "system", "content": "Be brief."}, ASK], None),
    "a switch beside words": (SWITCH, [{"role": "system", "content": "Be brief. /loud"}, ASK], None),
    "a switch alone": (SWITCH, [{"role": "system", "content": "/quiet"}, ASK], None),
    "a switch that is on": (SWITCH, [{"role": "system", "content": "/loud"}, ASK], None),
    "a switch that is read and not written": (READ_ALONE, [{"role": "system", "content": "/quiet"}, ASK], None),
    "no words": (FIRST_ALONE, [{"role": "tool", "content": " "}, ASK], None),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_a_message_without_a_place_in_the_template_is_refused_and_one_that_is_read_is_not(case):
    template, prompt, first = FAMILIES[case]
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = template
    for _ in range(2):  # a form of chat is remembered
        for encode in (encode_prompt, lambda tokenizer, prompt: TurnTemplate(tokenizer).opening(prompt)):
            with refuses(first):
                assert encode(tokenizer, prompt)


def test_no_conversation_begins_without_what_its_template_leaves_out():
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = FIRST_ALONE
    with pytest.raises(LeftOut, match=r"leaves out message 0 \(developer\) wholly"):
        TurnTemplate(tokenizer).opening(FAMILIES["a developer's message"][1])


def test_what_is_remembered_of_a_template_is_not_anothers():
    tokenizer = bytes_tokenizer("chatml")
    prompt = [{"role": "developer", "content": "is it"}, ASK]
    assert encode_prompt(tokenizer, prompt)
    tokenizer.chat_template = FIRST_ALONE
    with refuses((0, "developer")):
        encode_prompt(tokenizer, prompt)


KNOWN = (
    "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("beside", [[], ["tool"]])
@pytest.mark.parametrize("role", ["tool", "user", "developer", "system"])
def test_an_answer_that_the_template_leaves_out_ends_its_conversation(role, beside):
    """What is refused in a prompt is refused in an answer of the environment, also behind another message."""
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = KNOWN
    template = TurnTemplate(tokenizer)
    said = [ASK, {"role": "assistant", "content": "4?"}]
    answer = [{"role": name, "content": f"words of {name}"} for name in (*beside, role)]
    if role in ("tool", "user"):
        assert f"words of {role}" in tokenizer.decode(template.between(said, [1], answer))
        assert template.refusal([*beside, role]) is None
    else:
        with pytest.raises(LeftOut, match=rf"leaves out message {2 + len(beside)} \({role}\) wholly"):
            template.between(said, [1], answer)
        assert "wholly" in (template.refusal([*beside, role]) or "")
