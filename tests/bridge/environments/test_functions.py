"""Functions as tools: each call is answered by what the function returns, and each fault by its words."""

import asyncio
import collections
import concurrent.futures
import datetime
import inspect
import logging
import sqlite3

import numpy as np
import pytest
import torch

from rl_bridge.environments import Step
from rl_bridge.environments.functions import function_tools
from tests.support.chat_templates import bytes_tokenizer

HALF = "\ud83d"


class Labelled:
    """A table of pandas, as far as it matters here: as a list it would lose its labels."""

    def __str__(self):
        return "a 1, b 2"

    def tolist(self):
        return [1, 2]


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


def cut(after: int) -> object:
    """
    Give or raise a text that was cut in a character.

    Args:
        after: Whether the text is an error's.
    """
    if after:
        raise ValueError(f"no file {HALF}")
    return {"text": HALF}


WITHOUT_ARGUMENTS = ("broken", "nobody", "result", "later", "at_once")


def parse(text):
    """Calls as ``name key=value …``, one a line; ``?`` is none that can be read."""
    if text == "?":
        raise ValueError("a call is a name with its arguments")
    names = [line.split() for line in text.splitlines() if "=" in line or line in WITHOUT_ARGUMENTS]
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
        ("add a=x", ['error: add: a: expected integer, not "x"']),
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


class Mute:
    """No text comes of this."""

    def __str__(self):
        raise RuntimeError("no words")


def count():
    yield 1


async def count_later():
    yield 1


Named = collections.namedtuple("Named", "day n")


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


TYPE = "error: TypeError: a tool returns text or JSON; this is of the type"


async def later(value):
    return value


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    "value, expected",
    [
        (None, "null"),
        ("", ""),
        (True, "true"),
        (float("inf"), "Infinity"),
        (b"ab", "b'ab'"),
        ({100, 9, 10}, "[9, 10, 100]"),
        ({1.5, -2, -10}, "[-10, -2, 1.5]"),
        ({1j: {b"b", b"a", b"c"}}, "{1j: [b'a', b'b', b'c']}"),
        ({(1, 2): {"q", "r", "p"}}, "{(1, 2): ['p', 'q', 'r']}"),
        (collections.defaultdict(set, {"of": set("edcba")}), '{"of": ["a", "b", "c", "d", "e"]}'),
        (collections.namedtuple("Found", "names")({"b", "a"}), '[["a", "b"]]'),
        ({frozenset("ab"), frozenset("dc")}, '[["a", "b"], ["c", "d"]]'),
        # What JSON cannot hold is shown by Python, with its labels.
        (Named(datetime.date(2020, 1, 1), 3), "Named(day=datetime.date(2020, 1, 1), n=3)"),
        (Named(datetime.date(2020, 1, 1), {"b", "a"}), "Named(day=datetime.date(2020, 1, 1), n=['a', 'b'])"),
        (collections.defaultdict(int, {(1, 2): 3}), "defaultdict(<class 'int'>, {(1, 2): 3})"),
        ({frozenset("edcba"): 1}, "{('a', 'b', 'c', 'd', 'e'): 1}"),
        ({(2, frozenset("edcba")): {1}}, "{(2, ('a', 'b', 'c', 'd', 'e')): [1]}"),
        ({"places": frozenset("edcba")}, '{"places": ["a", "b", "c", "d", "e"]}'),
        (datetime.date(2020, 1, 1), "2020-01-01"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (np.float32(0.1), "0.1"),
        (np.array([0.1, 2], np.float32), "[0.1, 2.0]"),
        (np.longdouble(0.5), "0.5"),
        (torch.tensor([[0.1]], requires_grad=True), "[[0.1]]"),
        (torch.tensor([1, 2]), "[1, 2]"),
        ({"stdout": "<function f at 0x7f3a12bc>", "code": 0}, '{"stdout": "<function f at 0x7f3a12bc>", "code": 0}'),
        (Labelled(), "a 1, b 2"),
        (np.bool_(True), "true"),
        (np.arange(5000), str(list(range(5000)))),
        (torch.tensor(3), "3"),
        ({"rows": torch.arange(2000)}, f'{{"rows": {list(range(2000))}}}'),
        ({"n": np.int64(3), "x": [np.float32(0.1)]}, '{"n": 3, "x": [0.1]}'),
        (Mute(), "error: RuntimeError: no words"),
        ({(1, 2): object()}, f"{TYPE} dict, or has an object"),
        ({"n": count()}, f"{TYPE} dict, or has an object"),
        (count(), f"{TYPE} generator, or has an object"),
        (count_later(), f"{TYPE} async_generator, or has an object"),
        (map(str, [1]), f"{TYPE} map, or has an object"),
        (count, f"{TYPE} function, or has an object"),
        (nested(100_000), "error: RecursionError: maximum recursion depth exceeded while encoding a JSON object"),
        (10**5000, "error: ValueError: Exceeds the limit (4300 digits) for integer string conversion"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_whatever_a_function_returns_is_read_as_its_words_or_as_a_fault(value, expected, waits, caplog):
    """The policy read "<generator object … at 0x7f…>", another text in every run, and nobody else read anything."""

    def result() -> object:
        """Give it."""
        return later(value) if waits else value

    with caplog.at_level(logging.CRITICAL, logger="rl_bridge.environments.functions"):
        (words,) = answers("result", result)
    assert words == expected if "digits" not in expected else words.startswith(expected)


@pytest.mark.parametrize("order", ["later at_once later at_once", "at_once later", "later later at_once"])
def test_calls_are_made_in_the_order_the_policy_wrote_them(order):
    """A call that had to be awaited was made after all that had not: one read what an earlier one had yet to write."""
    made = []

    async def later() -> int:
        """Answer later."""
        await asyncio.sleep(0)
        made.append("later")
        return len(made)

    def at_once() -> int:
        """Answer at once."""
        made.append("at_once")
        return len(made)

    names = order.split()
    assert answers("\n".join(names), later, at_once) == [str(n + 1) for n in range(len(names))]
    assert made == names


def test_functions_that_wait_for_nothing_answer_in_their_thread():
    session = function_tools([add], bytes_tokenizer("chatml"), parse)()
    assert isinstance(session.step([{"role": "assistant", "content": "add a=1"}]), Step)


def test_a_function_that_raises_is_logged_once(caplog):
    tools = function_tools([broken], bytes_tokenizer("chatml"), parse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tools().step([{"role": "assistant", "content": "broken"}])
    assert [record.message for record in caplog.records] == ["the tool broken raised; the policy reads the error"]


OF_A_THREAD = (
    ValueError("signal only works in main thread of the main interpreter"),
    ValueError("set_wakeup_fd only works in main thread of the main interpreter"),
    RuntimeError("There is no current event loop in thread 'environment'."),
    RuntimeError("main thread is not in main loop"),
    AttributeError("'_thread._local' object has no attribute 'length'"),
    sqlite3.ProgrammingError(
        "SQLite objects created in a thread can only be used in that same thread. "
        "The object was created in thread id 1 and this is thread id 2."
    ),
    type("error", (Exception,), {"__module__": "greenlet"})("cannot switch to a different thread (which has exited)"),
)
QUOTES = [
    kind(beginning + str(error))
    for error in OF_A_THREAD
    for kind in (KeyError, ValueError, RuntimeError, LookupError)
    for beginning in ("", "no results for ")
    if beginning or kind in (KeyError, LookupError)
]


@pytest.mark.parametrize(
    "error", [*OF_A_THREAD, *QUOTES], ids=[f"own {i}" for i in range(7)] + [f"quote {i}" for i in range(len(QUOTES))]
)
def test_only_a_call_in_the_wrong_thread_is_no_reply_and_a_reply_may_quote_its_words(error):
    """A policy that wrote "main thread" in a query ended the run, where the tool quoted the query."""
    tools = function_tools([broken], bytes_tokenizer("chatml"), parse)
    assert tools.raised("broken", error) == f"error: {type(error).__name__}: {error}", "in the main thread"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(tools.raised, "broken", error)
        if error in OF_A_THREAD:
            assert reply.exception() is error
        else:
            assert reply.result() == f"error: {type(error).__name__}: {error}"


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


def before_the_slash(a: int, /) -> int:
    """
    Add one.

    Args:
        a: The number.
    """
    return a + 1


def starred(*a: int) -> int:
    """
    Add numbers.

    Args:
        a: The numbers.
    """
    return sum(a)


def twice_starred(**a: int) -> int:
    """
    Add numbers.

    Args:
        a: The numbers.
    """
    return sum(a.values())


class Adding:
    """
    Add a number.

    Args:
        a: The number.
    """

    def __init__(self, a: int):
        self.a = a

    def method(self, b: int) -> int:
        """
        Add to it.

        Args:
            b: The number.
        """
        return self.a + b


def yielding(a: int) -> int:
    """
    Count.

    Args:
        a: The last number.
    """
    yield from range(a)


async def yielding_later(a: int) -> int:
    """
    Count.

    Args:
        a: The last number.
    """
    yield a


@pytest.mark.parametrize(
    "function, words",
    [
        (before_the_slash, r"none of these can be a: int: name its parameters"),
        (starred, r"none of these can be \*a: int: name its parameters"),
        (twice_starred, r"none of these can be \*\*a: int: name its parameters"),
        (Adding, r"none of these can be a: int: name its parameters"),
        (Adding.method, r"none of these can be self: name its parameters.*give an object's method"),
        (yielding, r"the tool yielding yields: the policy reads what a tool returns"),
        (yielding_later, r"the tool yielding_later yields: the policy reads what a tool returns"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_function_that_every_call_would_misfit_is_refused(function, words):
    """The policy was shown a schema of which each call failed, or bound as another one: {"a": {"a": 1}}."""
    with pytest.raises(ValueError, match=words):
        function_tools([function], bytes_tokenizer("chatml"), parse)


def test_a_method_and_named_arguments_behind_a_star_are_a_tool():
    def behind(*, b: int) -> int:
        """
        Add one.

        Args:
            b: The number.
        """
        return b + 1

    assert answers("method b=2\nbehind b=3", Adding(1).method, behind) == ["3", "4"]


@pytest.mark.parametrize(
    "calls",
    [None, 3, "add", ["add"], ("add", {}), [("add",)], [("add", None)], [("add", [1])], [(1, {})], [{"name": "add"}]],
    ids=str,
)
@pytest.mark.parametrize("of_every_turn", [True, False], ids=["every turn", "some turn"])
def test_a_parse_that_gives_no_calls_is_named_and_no_fault_of_the_policy(calls, of_every_turn):
    """The policy read that there is no tool 'name', of a dict's key; and None, of a turn without a call, was no end."""

    def own_parse(text):
        return calls if of_every_turn or text else []

    with pytest.raises(TypeError, match=r"parse returned .* expected a list of calls"):
        function_tools([add], bytes_tokenizer("chatml"), own_parse)().step([{"role": "assistant", "content": "x"}])


def test_a_parse_may_yield_calls_and_refuse_an_empty_turn():
    def own_parse(text):
        if not text:
            raise ValueError("say something")
        yield ["add", {"a": 1}]

    session = function_tools([add], bytes_tokenizer("chatml"), own_parse)()
    contents = [session.step([{"role": "assistant", "content": text}]).messages[0]["content"] for text in ("x", "")]
    assert contents == ["2", "error: say something"]


def test_the_schemas_are_of_the_functions():
    schemas = function_tools([add], bytes_tokenizer("chatml"), parse).schemas
    assert schemas[0]["function"]["parameters"]["required"] == ["a"]
