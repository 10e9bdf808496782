"""Arguments of a tool: what its annotation means reaches the function, and everything else is the policy's fault."""

import asyncio
import datetime
import enum
import inspect
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Optional, TypedDict

import numpy as np
import pytest

from rl_bridge.environments.functions import function_tools
from tests.support.chat_templates import bytes_tokenizer


class Colour(enum.Enum):
    RED = "red"


class Place(TypedDict):
    x: int


@dataclass
class Point:
    x: int


VALUES = (
    "null",
    "true",
    "3",
    "3.0",
    "3.5",
    "-0.0",
    '"3"',
    '""',
    '"red"',
    "[]",
    "[1, 2.0]",
    '["1"]',
    "[[1]]",
    "{}",
    '{"x": 1}',
    '{"x": "1"}',
    "[1]",
    "[1, 2, 3]",
    "1e400",
    "NaN",
    '"a"',
    "0",
    "false",
    "1",
)
FITS = {
    int: ["3", "3.0→3", "-0.0→0", "0", "1"],
    float: ["3", "3.0", "3.5", "-0.0", "1e400", "NaN", "0", "1"],
    str: ['"3"', '""', '"red"', '"a"'],
    bool: ["true", "false"],
    int | float: ["3", "3.0", "3.5", "-0.0", "1e400", "NaN", "0", "1"],
    int | str: ["3", "3.0→3", "-0.0→0", "0", "1", '"3"', '""', '"red"', '"a"'],
    bool | int: ["true", "false", "3", "3.0→3", "-0.0→0", "0", "1"],
    Optional[Literal["red"]]: ["null", '"red"'],  # noqa: UP045 - as people write it
    int | None: ["null", "3", "3.0→3", "-0.0→0", "0", "1"],
    list: ["[]", "[1, 2.0]", '["1"]', "[[1]]", "[1]", "[1, 2, 3]"],
    list[int]: ["[]", "[1, 2.0]→[1, 2]", "[1]", "[1, 2, 3]"],
    list[str] | None: ["null", "[]", '["1"]'],
    list[list[int]]: ["[]", "[[1]]"],
    tuple[int, float]: ["[1, 2.0]→(1, 2.0)"],
    tuple: ["[]→()", "[1, 2.0]→(1, 2.0)", "[\"1\"]→('1',)", "[[1]]→([1],)", "[1]→(1,)", "[1, 2, 3]→(1, 2, 3)"],
    list[int] | int: ["[]", "[1, 2.0]→[1, 2]", "[1]", "[1, 2, 3]", "3", "3.0→3", "-0.0→0", "0", "1"],
    dict: ["{}", '{"x": 1}', '{"x": "1"}'],
    dict[str, int]: ["{}", '{"x": 1}'],
    dict[Literal["x"], int]: ["{}", '{"x": 1}'],
    Place: ["{}", '{"x": 1}', '{"x": "1"}'],
    Mapping: ["{}", '{"x": 1}', '{"x": "1"}'],
    Literal["red", "a"]: ['"red"', '"a"'],
    Literal[1, "a"]: ["1", '"a"'],
    Literal[None, 3]: ["null", "3", "3.0→3"],
    Literal[True]: ["true"],
    Any: list(VALUES),
}
"""An annotation → the JSON that fits it, →what the function gets."""


def tool(hint, default=inspect.Parameter.empty):
    def look(a):
        """
        Look.

        Args:
            a: What it gets.
        """
        return repr(a)

    parameter = inspect.Parameter("a", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint)
    look.__signature__ = inspect.Signature([parameter])
    look.__annotations__ = {"a": hint}
    return look


TOKENIZER = bytes_tokenizer("chatml")


def answer(function, value):
    """The content of the answer to one call."""
    tools = function_tools([function], TOKENIZER, lambda text: [("look", {"a": value})] * bool(text))
    step = tools().step([{"role": "assistant", "content": "x"}])
    step = asyncio.run(step) if inspect.isawaitable(step) else step
    return step.messages[0]["content"]


@pytest.mark.parametrize("hint", list(FITS), ids=str)
def test_an_argument_is_what_its_annotation_says_or_a_fault_of_the_call(hint):
    """A policy that called multiply("3", 4) read that the product of these integers is 3333."""
    fits = {text: after or repr(json.loads(text)) for text, _, after in (entry.partition("→") for entry in FITS[hint])}
    words = {text: answer(tool(hint), json.loads(text)) for text in VALUES}
    assert {text: answer for text, answer in words.items() if text in fits} == fits
    faults = [answer for text, answer in words.items() if text not in fits]
    assert all(re.fullmatch("error: look: a.*: expected .*, not .*", words) for words in faults), faults


@pytest.mark.parametrize(
    "hint, value, words",
    [
        (int, "3", 'a: expected integer, not "3"'),
        (int, True, "a: expected integer, not true"),
        (int | str, None, "a: expected integer or string, not null"),
        (list[int] | None, 3, "a: expected array of integer or null, not 3"),
        (list[int], [1, "2"], 'a[1]: expected integer, not "2"'),
        (dict[str, list[float]], {"x": [None]}, "a.x[0]: expected number, not null"),
        (tuple[int, str], [1], "a: expected array of integer, string, not [1]"),
        (Literal["red", 1], "blue", 'a: expected "red" or 1, not "blue"'),
        (list[int] | bool, "x", 'a: expected array of integer or boolean, not "x"'),
        (int, "x" * 200, f'a: expected integer, not "{"x" * 79}…'),
    ],
    ids=str,
)
def test_the_policy_reads_the_argument_what_is_expected_and_what_came(hint, value, words):
    assert answer(tool(hint), value) == f"error: look: {words}"


def test_choices_of_a_docstring_are_those_of_the_schema():
    def look(a: list[str]) -> str:
        """
        Look.

        Args:
            a: The drinks (choices: ["tea", "water"])
        """
        return repr(a)

    assert answer(look, ["tea", "water"]) == "['tea', 'water']"
    assert answer(look, ["ink"]) == 'error: look: a: expected "tea" or "water", not ["ink"]'


def test_choices_hold_for_one_and_for_several():
    def look(a: str | list[str]) -> str:
        """
        Look.

        Args:
            a: The drinks (choices: ["tea", "water"])
        """
        return repr(a)

    assert answer(look, "tea") == "'tea'" and answer(look, ["water"]) == "['water']"
    for value in ("ink", ["tea", "ink"]):
        assert answer(look, value) == f'error: look: a: expected "tea" or "water", not {json.dumps(value)}'


def test_a_parser_that_reads_python_may_give_tuples_and_numbers_of_numpy():
    assert answer(tool(list[int]), (1, np.int64(2))) == "[1, 2]"
    assert answer(tool(tuple[int, str]), (1, "x")) == "(1, 'x')"
    assert answer(tool(float), np.float32(0.5)) == "0.5"
    assert answer(tool(Any), (1, 2)) == "(1, 2)"


def test_a_default_of_none_may_be_written():
    assert answer(tool(int, default=None), None) == "None"
    assert answer(tool(int, default=1), None) == "error: look: a: expected integer, not null"


def test_a_value_in_ten_thousand_lists_is_a_fault_of_the_call():
    value = []
    for _ in range(10_000):
        value = [value]
    assert answer(tool(int), value).startswith("error: look: ")


@pytest.mark.parametrize(
    "hint, name",
    [
        (Colour, "Colour"),
        (list[Colour] | None, "Colour"),
        (Point, "Point"),
        (datetime.date, "date"),
        (set, "set"),
        (bytes, "bytes"),
        (pathlib.Path, "Path"),
        (dict[int, str], r"dict\[int, str\]"),
        (dict[Literal["x", 1], int], r"dict\[typing.Literal\['x', 1\], int\]"),
        (object, "object"),
        (Iterable, "Iterable"),
        (dict[str, set], "set"),
    ],
    ids=str,
)
def test_a_type_that_no_call_can_have_is_refused(hint, name):
    """The schema said "object", the call had one, and the function failed on it each time."""
    with pytest.raises(ValueError, match=f"the tool look: no JSON value is of the type {name} of its argument a"):
        answer(tool(hint), None)
