"""The fingerprint of rows: of any values that a reader gives, one in all processes, another one of another value."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy
import pytest

from rl_bridge.run.provenance import of_rows


class Plain:
    def __init__(self, number):
        self.number = number


@dataclasses.dataclass
class Record:
    number: int


def named(completion):
    return 1.0


# What a column holds → another value of it.
VALUES = {
    "numbers and texts as names": ({1: "a", "b": 2}, {1: "a", "b": 3}),
    "tuples as names": ({(1, 2): "a"}, {(1, 3): "a"}),
    "None as a name": ({None: 1, "b": 2}, {None: 1, "b": 3}),
    "a name and its text": ({1: "a", "b": {1, 2}}, {"1": "a", "b": {1, 2}}),
    "a set": ({"a", "b", "c"}, {"a", "b", "d"}),
    "sets in a list": ([frozenset("ab"), {1: {"x", "y"}}], [frozenset("ac"), {1: {"x", "y"}}]),
    "an object": (Plain(1), Plain(2)),
    "an object with a set": (Plain({"a", "b", "c"}), Plain({"a", "b", "d"})),
    "a record": (Record(1), Record(2)),
    "an array": (numpy.arange(3000), numpy.arange(3000) % 2999),
    "a number of an array": (numpy.float32(0.5), numpy.float32(0.25)),
    "a text with an address": ("at 0x12ab", "at 0x12ac"),
    "bytes": (b"a", b"b"),
    "a function": (named, of_rows),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_json_does_not_know_has_a_fingerprint_of_its_own(name):
    first, second = VALUES[name]
    row = {"prompt": "?", "extra": first}
    assert of_rows([row]) == of_rows([dict(reversed(row.items()))]) != of_rows([{"prompt": "?", "extra": second}])


def test_every_process_has_the_same_fingerprints():
    code = "import json; from tests.bridge.run.test_fingerprints import *; print(json.dumps(of_all()))"
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and len({*found[0].values()}) == len(VALUES)


def of_all():
    return {name: of_rows([{"extra": first}]) for name, (first, _) in VALUES.items()}


def test_rows_of_json_keep_their_fingerprint():
    """A run of before is resumed."""
    assert of_rows([{"b": [1, None, "é"], "a": {"x": 0.5}}], [{"prompt": "?"}]) == "c36673d011b77212"


def test_a_value_without_an_end_is_named_by_its_row():
    endless = Plain(1)
    endless.itself = endless
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 3: a value has no fingerprint"):
        of_rows([{"extra": endless, "_where": "rows.jsonl, row 3"}])
