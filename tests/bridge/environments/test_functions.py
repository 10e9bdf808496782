"""Functions as tools: each call is answered by what the function returns, and each fault by its words."""

import asyncio
import inspect
import logging

import pytest

from rl_bridge.environments import Step
from rl_bridge.environments.functions import function_tools
from tests.support.chat_templates import bytes_tokenizer

HALF = "\ud83d"


def add(a: int, b: int = 1) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow(text: str) -> dict:
    """
    Answer later.

    Args:
        text: What comes back; nothing raises.
    """
    await asyncio.sleep(0)
    if not text:
        raise ValueError("no text")
    return {"text": text}


def broken() -> str:
    """Raise."""
    raise RuntimeError("out of order")


def cut(after: bool) -> object:
    """
    Give or raise a text that was cut in a character.

    Args:
        after: Whether the text is an error's.
    """
    if after:
        raise ValueError(f"no file {HALF}")
    return {"text": HALF}


def parse(text):
    """Calls as ``name key=value …``, one a line; ``?`` is none that can be read."""
    if text == "?":
        raise ValueError("a call is a name with its arguments")
    names = [line.split() for line in text.splitlines() if "=" in line or line in ("broken", "nobody")]
    return [
        (name, {key: int(value) if value.isdigit() else value for key, value in (pair.split("=") for pair in pairs)})
        for name, *pairs in names
    ]


def answers(text, *functions):
    """Contents of the messages that follow a turn."""
    session = function_tools(functions or (add, slow, broken), bytes_tokenizer("chatml"), parse)()
    assert session.reset({"prompt": "?"}) == ({"role": "user", "content": "?"},)
    step = session.step([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])
    step = asyncio.run(step) if inspect.isawaitable(step) else step
    assert isinstance(step, Step) and step.reward is None and not step.done
    assert all(message["role"] == "tool" for message in step.messages)
    return [message["content"] for message in step.messages]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("It is 3.", []),
        ("add a=1 b=2", ["3"]),
        ("add a=1", ["2"]),
        ("add a=1 b=2\nslow text=x\nadd a=4", ["3", '{"text": "x"}', "5"]),
        ("nobody", ["error: there is no tool 'nobody'; there are add, slow, broken"]),
        ("add b=2", ["error: add: missing a required argument: 'a'"]),
        ("add a=1 c=2", ["error: add: got an unexpected keyword argument 'c'"]),
        ("add a=x", ['error: TypeError: can only concatenate str (not "int") to str']),
        ("slow text=", ["error: ValueError: no text"]),
        ("broken", ["error: RuntimeError: out of order"]),
        ("?", ["error: a call is a name with its arguments"]),
    ],
)
def test_a_turn_s_calls_are_answered_in_order(text, expected):
    assert answers(text) == expected


@pytest.mark.parametrize("after, character", [(0, 10), (1, 27)])
def test_half_of_a_character_is_an_error_that_the_policy_reads(after, character, caplog):
    """A tokenizer cannot read such a text, and no file of the run could have it; nor can the log of this test."""
    place = f"the result: half of a surrogate pair (U+D83D) at character {character}"
    with caplog.at_level(logging.CRITICAL, logger="rl_bridge.environments.functions"):
        assert answers(f"cut after={after}", cut) == [f"error: {place}: the text was cut in a character"]


def test_functions_that_wait_for_nothing_answer_in_their_thread():
    session = function_tools([add], bytes_tokenizer("chatml"), parse)()
    assert isinstance(session.step([{"role": "assistant", "content": "add a=1"}]), Step)


def test_a_function_that_raises_is_logged_once(caplog):
    tools = function_tools([broken], bytes_tokenizer("chatml"), parse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tools().step([{"role": "assistant", "content": "broken"}])
    assert [record.message for record in caplog.records] == ["the tool broken raised; the policy reads the error"]


def untyped(a):
    """
    Add one.

    Args:
        a: The number.
    """


def undescribed(a: int) -> int:
    """Add one."""
    return a


@pytest.mark.parametrize(
    "functions, words",
    [
        ([], "tools has no function"),
        ([add, add], "two tools are named add"),
        ([untyped], "the tool untyped needs types and a docstring"),
        ([undescribed], "the tool undescribed needs types and a docstring"),
        ([lambda a: a], "the tool <lambda> needs types and a docstring"),
        ([add], "does not show the model its tools"),
    ],
    ids=["none", "twice", "untyped", "undescribed", "lambda", "template"],
)
def test_tools_that_a_model_could_not_call_are_refused(functions, words):
    with pytest.raises(ValueError, match=words):
        function_tools(functions, bytes_tokenizer("chatml"))


def test_the_schemas_are_of_the_functions():
    schemas = function_tools([add], bytes_tokenizer("chatml"), parse).schemas
    assert schemas[0]["function"]["parameters"]["required"] == ["a"]
