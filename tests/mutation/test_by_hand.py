"""Faults by hand: each can be planted, and becomes a mutant of the right function; which tests reach a file."""

import ast
import importlib
import sys

import pytest

from tests.mutation import by_hand
from tests.mutation.forked import Reach, ordered, words_of
from tests.mutation.patch import Package
from tests.mutation.worker import ROOT

PLANTED = [pytest.param(entry, id=f"{entry['file']}-{i}") for i, entry in enumerate(by_hand.read(""))]
SOURCE = """import dataclasses

LIMIT = 2.0


def scale(x, by=1.5):
    y = x * by
    return y


@dataclasses.dataclass(frozen=True)
class Piece:
    share: float = 0.5
"""


@pytest.mark.parametrize("entry", PLANTED)
def test_a_fault_written_by_hand_can_be_planted(entry):
    """Stale: the code was changed; write the fault anew, or drop it where such a mistake cannot be made any more."""
    assert by_hand.wrong(entry, ROOT) == ""


def test_the_lists_are_long_enough():
    assert len(by_hand.read("rl_fn")) >= 120 and len(by_hand.read("rl_bridge")) >= 80


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("x * by", "x / by", ""),
        ("1.5", "1.5 ", "nothing changes"),
        ("y", "z", "`before` is there 4 times"),
        ("return y", "return (", "a syntax error"),
    ],
)
def test_what_is_wrong_with_a_fault(tmp_path, before, after, reason):
    (tmp_path / "code.py").write_text(SOURCE)
    found = by_hand.wrong({"file": "code.py", "before": before, "after": after, "why": "it is"}, tmp_path)
    assert found.startswith(reason) and bool(found) == bool(reason)


def entry(before, after):
    return {"file": "toy_by_hand/code.py", "before": before, "after": after, "why": "a slip"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "toy_by_hand"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "code.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield Package(folder, "toy_by_hand"), tmp_path
    for name in ("toy_by_hand.code", "toy_by_hand"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("before", "after", "owner", "result"),
    [
        ("y = x * by", "y = x + by", "scale", 3.5),
        ("by=1.5", "by=3.0", "scale", 6.0),
        ("    return y\n", "", "scale", None),
        ("LIMIT = 2.0", "LIMIT = 4.0", "", 3.0),
        ("float = 0.5", "float = 1.0", "Piece", 3.0),
    ],
)
def test_a_fault_is_in_the_living_code_and_taken_back(package, before, after, owner, result):
    toy, root = package
    (fault,) = toy.add([entry(before, after)], root)
    code = toy.module("code.py")
    assert fault.owner == owner and after.strip() in toy.source(fault)
    with toy.applied(fault):
        assert code.scale(2.0) == result
        assert {"": code.LIMIT, "Piece": code.Piece().share}.get(owner) == {"": 4.0, "Piece": 1.0}.get(owner)
    assert (code.scale(2.0), code.LIMIT, code.Piece.share) == (3.0, 2.0, 0.5)
    assert ast.unparse(ast.parse(SOURCE)) == ast.unparse(toy.trees["code.py"])


@pytest.mark.long
def test_the_nearest_tests_come_first():
    reach = Reach(ROOT, ROOT / "tests" / "bridge")
    adapters, process = (
        reach.of(ROOT / f"bridge/rl_bridge/{file}") for file in ("weights/adapters.py", "rewards/reward_process.py")
    )
    assert adapters[0] == "tests/bridge/weights/test_adapters.py"
    assert process[0] == "tests/bridge/rewards/test_reward_process.py"
    assert "tests/bridge/data/test_reading.py" not in process


def test_tests_of_the_same_name_come_first_and_then_some_cases_of_each():
    tree = ast.parse('@rule("reduce_max", "reduce_min")\ndef _extremum(b): pass')
    words = words_of(tree, "_extremum", "rules/reductions.py")
    assert words == [{"extremum", "reduce_max", "reduce_min"}, {"reductions"}]
    names = ["a.py::t[0]", "a.py::t[1]", "a.py::t[2]", "a.py::t[3]", "test_reductions.py::u", "a.py::t[reduce_max-0]"]
    assert [names[i] for i in ordered(names, words)] == [names[i] for i in (5, 4, 0, 1, 2, 3)]
    assert ordered([*names[:4], "b.py::v"], words) == [0, 1, 2, 4, 3]
    assert words_of(tree, "Builder.__init__", "emitter.py") == [set(), {"emitter"}]
