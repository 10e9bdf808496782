"""A call of a tool is in the tokens, with tool and arguments; or refused where it is trained on, named elsewhere."""

import contextlib
import json

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.messages import OTHER_CALLS
from rl_bridge.data.rows import policy_row, supervised_row
from rl_bridge.models.chat_templates import memory_of
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.row_checks import remark_on_conversations, remark_on_prompts
from rl_bridge.models.unwritten_calls import TRIES
from tests.support.chat_templates import CHATML, tokenizer_with

ASK = {"role": "user", "content": "What is it?"}


# What templates write of calls.
EACH = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}WRITES{% endfor %}", 1)
FIRST_CALL = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] }}{% endif %}", 1
)
CALLS = {
    "all": EACH.replace("WRITES", "{{ c | tojson }}"),
    "other signs": EACH.replace("WRITES", "[{{ c.function.name }}({{ c.function.arguments.items() | list }})]"),
    "numbers": EACH.replace("WRITES", "{{ loop.index }}"),
    "names": EACH.replace("WRITES", "{{ c.function.name }}"),
    "the first": FIRST_CALL,
    "none": CHATML,
}  # fmt: skip


def one_call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TURNS = {
    "alone": ("", [one_call("add", a=1)]),
    "beside its words": ("add a 1 x", [one_call("add", a=1)]),
    "two": ("", [one_call("add", a=1), one_call("sub", b="x")]),
    "twice": ("", [one_call("add", a=1), one_call("add", a=1)]),
    "no arguments": ("", [one_call("now")]),
}


def lost_calls(case, calls):
    """Whether the template leaves something out of the calls; of one tool alone the name need not be there."""
    if case == "the first":
        return len(calls) > 1
    return case == "none" or (
        case != "all" and case != "other signs" and any(c["function"]["arguments"] for c in calls)
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_is_trained_on_is_in_the_tokens_or_refused(case, turn, late):
    """Its tool and its arguments; one that is not trained on is named elsewhere."""
    content, calls = TURNS[turn]
    tokenizer = tokenizer_with(CALLS[case])
    calling = {"role": "assistant", "content": content, "tool_calls": calls}
    rest = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    row = supervised_row({"messages": [ASK, calling, *rest]})
    for _ in range(TRIES + 8 if late else 0):  # the first calls are looked at more closely than later ones
        with contextlib.suppress(ValueError):
            encode_row(tokenizer, row)
    lost = pytest.raises(ValueError, match=r"leaves out the call '\w+' with .* of message 1 \(assistant\), which is")
    for options in ({}, {"to_end": True}):
        with lost if lost_calls(case, calls) else contextlib.nullcontext():
            encode_row(tokenizer, row, **options)
    with pytest.raises(ValueError, match="apply_chat_template=false leaves out the call"):
        encode_row(tokenizer, row, apply_chat_template=False)
    untrained = supervised_row({"messages": [ASK, calling | {"weight": 0}, *rest]})
    encode_row(tokenizer, untrained)
    encode_row(tokenizer, untrained, apply_chat_template=False)
    encode_prompt(tokenizer, [ASK, calling, rest[0]])
    with lost if lost_calls(case, calls) else contextlib.nullcontext():
        encode_completion(tokenizer, [ASK], [row["messages"][1]])
    encode_completion(tokenizer, [ASK, calling, rest[0]], "2")


THINKS = "I call add with a, 1 and sub with b, x."


@pytest.mark.parametrize("key", ["content", "thinking"])
@pytest.mark.parametrize("before", ["one call", "two calls that are written", "the same row"])
def test_a_call_that_the_words_beside_name_is_refused_wherever_its_row_stands(key, before):
    """Of many rows of another kind, or of its own kind, one is not taken for another."""
    template = FIRST_CALL.replace("{{ m.content }}", "{{ m.content }}{{ m.thinking }}", 1)
    tokenizer = tokenizer_with(template)
    two = [one_call("add", a=1), one_call("sub", b="x")]
    calling = {"role": "assistant", "content": "", key: THINKS, "tool_calls": two}
    rows = {
        "one call": [ASK, calling | {"tool_calls": two[:1]}],
        "two calls that are written": [ASK, calling | {"tool_calls": 2 * two[:1], key: ""}],
        "the same row": [ASK, calling],
    }
    for _ in range(TRIES + 2):
        with contextlib.suppress(ValueError):
            encode_row(tokenizer, supervised_row({"messages": rows[before]}))
    with pytest.raises(ValueError, match=r"leaves out the call 'sub' with \{'b': 'x'\} of message 1"):
        encode_row(tokenizer, supervised_row({"messages": [ASK, calling]}))


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("turn", TURNS)
def test_a_call_that_is_not_trained_on_is_named(case, turn):
    """Once, by the key that nothing reads or by the call that is not there."""
    content, calls = TURNS[turn]
    tokenizer = tokenizer_with(CALLS[case])
    calling = {"role": "assistant", "content": content, "tool_calls": calls, "weight": 0}
    talk = [ASK, calling, {"role": "tool", "content": "2"}]
    remark_on_prompts(tokenizer, [policy_row({"prompt": talk})])
    of_prompt = remarks()
    remark_on_conversations(
        tokenizer, [supervised_row({"messages": [*talk, {"role": "assistant", "content": "It is 2."}]})]
    )
    for lines in (of_prompt, remarks()):
        assert len(lines) == lost_calls(case, calls)
        words = (
            "`tool_calls` is not read"
            if case == "none"
            else 'of what assistant says in 1 of 1 rows: first row 1, "the call'
        )
        assert all(words in line for line in lines)


@pytest.mark.parametrize("key", OTHER_CALLS)
def test_a_call_under_another_key_is_written_or_refused(key):
    call = {"name": "add", "arguments": json.dumps({"a": 1})}
    row = supervised_row({"messages": [ASK, {"role": "assistant", "content": "", key: call}]})
    reads = tokenizer_with(
        CHATML.replace("{{ m.content }}", f"{{{{ m.content }}}}{{{{ (m.{key} | default({{}})).name }}}}", 1)
    )
    assert "add" in reads.decode(encode_row(reads, row).tokens)
    for options in ({}, {"apply_chat_template": False}):
        with pytest.raises(ValueError, match=f"leaves out the call in '{key}', .*which is trained on"):
            encode_row(tokenizer_with(CHATML), row, **options)


def test_words_that_json_escapes_cost_no_second_look(monkeypatch):
    """Code in arguments: its lines' ends and quotes stand in the text as JSON writes these."""
    from rl_bridge.models import unwritten_calls

    tokenizer, renders = tokenizer_with(CALLS["all"]), []
    row = supervised_row(
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [one_call("run", code='print("é")\n')]}]}
    )
    plain = unwritten_calls.rendered
    monkeypatch.setattr(
        unwritten_calls, "rendered", lambda *args, **options: renders.append(1) or plain(*args, **options)
    )
    for number in range(TRIES + 5):
        encode_row(tokenizer, row)
        assert bool(renders) == (number < TRIES)
        renders.clear()


@pytest.mark.parametrize("forms", [1, 2, 3])
def test_forms_that_the_memory_holds_are_looked_at_closely_at_first_alone(forms, monkeypatch):
    """The memory has an end: more forms than it holds are all looked at closely, for ever."""
    from rl_bridge.models import unwritten_calls

    tokenizer, renders, rounds = tokenizer_with(CALLS["all"]), [], TRIES + 3
    calls = [{"role": "assistant", "content": "", "tool_calls": [one_call(f"run_{n}", a=1)]} for n in range(forms)]
    plain = unwritten_calls.rendered
    monkeypatch.setattr(unwritten_calls, "FORMS", 2)
    monkeypatch.setattr(
        unwritten_calls, "rendered", lambda *args, **options: renders.append(1) or plain(*args, **options)
    )
    looks = 0
    for _ in range(rounds):
        for calling in calls:
            encode_row(tokenizer, supervised_row({"messages": [ASK, calling]}))
            looks += bool(renders)
            renders.clear()
    assert looks == forms * (TRIES if forms <= 2 else rounds)
    assert len(memory_of(tokenizer, "calls")) <= 2
