"""The record of which tests run which lines, in a repository of one file, and the tests that a mutant gets from it."""

import json
import subprocess
import textwrap

import pytest

from tests.mutation.entered import Entered, block_of, marked, record, tables
from tests.mutation.forked import Server, of_each_some
from tests.mutation.mutants import mutants

SOURCE = '''"""A module."""

from __future__ import annotations

import sys


def sign(x):
    """-1, 0 or 1."""
    if x > 0:
        return 1
    elif x < 0:
        return -1
    else:
        while x:
            x -= 1
        return 0


class Counter:
    def count(self, to): return to

    @property
    def total(self):
        try:
            return sys.missing
        except AttributeError:
            return 3


def in_another_process():
    return 7


if __name__ == "__main__":
    print(in_another_process())
'''
TESTS = """
import os, subprocess, sys
import pytest
from code_recorded import Counter, sign

@pytest.mark.parametrize("x", [1, 2, 3, 4, 5])
def test_positive(x):
    assert sign(x) == 1

def test_negative():
    assert sign(-1) == -1

def test_zero_after_a_fork():
    child = os.fork()
    if child == 0:
        os._exit(sign(0))
    assert os.waitpid(child, 0)[1] == 0

def test_program():
    import code_recorded
    ran = subprocess.run([sys.executable, "-S", code_recorded.__file__], capture_output=True, text=True)
    assert ran.stdout == "7\\n"
    ran = subprocess.run([sys.executable, code_recorded.__file__], capture_output=True, text=True)
    assert ran.stdout == "7\\n"

def test_total_that_fails():
    assert Counter().total == 4
"""
FILE, T = "bridge/code_recorded.py", "tests/test_code.py::"


def line_of(text):
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    for name, text in {FILE: SOURCE, "tests/test_code.py": TESTS, "tests/mutation/__init__.py": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    out = folder / "entered.json"
    record(folder, "bridge", ["tests"], 1, out)
    return folder, out


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("if x > 0", {"test_negative", "test_zero_after_a_fork", *(f"test_positive[{x}]" for x in range(1, 6))}),
        ("return 1", {f"test_positive[{x}]" for x in range(1, 6)}),
        ("elif x < 0", {"test_negative", "test_zero_after_a_fork", *(f"test_positive[{x}]" for x in range(1, 6))}),
        ("return -1", {"test_negative"}),
        ("return 0", {"test_zero_after_a_fork"}),
        ("x -= 1", {"test_zero_after_a_fork"}),
        ("return 3", {"test_total_that_fails"}),
        ("return 7", {"test_program"}),
        ("import sys", set()),
        ("return to", set()),
    ],
)
def test_the_tests_that_run_a_line(repository, text, tests):
    """A block that nothing enters has the tests of the block around it; what is in no block has none."""
    folder, out = repository
    recorded = Entered(out, folder).of(FILE, SOURCE, line_of(text))
    assert {name.removeprefix(T) for name in recorded} == tests and len(recorded) == len(set(recorded))


def test_a_file_that_changed_has_no_tests_and_a_test_file_that_changed_no_names(repository, tmp_path):
    folder, out = repository
    data = json.loads(out.read_text())
    for name in (FILE, "tests/test_code.py"):
        changed = tmp_path / f"{name.replace('/', '_')}.json"
        changed.write_text(json.dumps(data | {"files": data["files"] | {name: "another"}}))
        assert Entered(changed, folder).of(FILE, SOURCE, line_of("return -1")) == []
    assert Entered(out, folder).of(FILE, SOURCE, line_of("return -1")) == [f"{T}test_negative"]
    assert Entered(tmp_path / "none.json", folder).of(FILE, SOURCE, line_of("return -1")) == []


def test_a_mutant_s_tests_are_those_of_its_line_and_test_files_newer_than_the_record(repository, tmp_path):
    folder, out = repository
    server = Server(folder, "bridge", "tests", out)
    assert server.recorded(folder / FILE, line_of("return -1"), []) == [f"{T}test_negative"]
    assert server.recorded(folder / FILE, 0, []) == server.recorded(folder / FILE, line_of("import sys"), []) == []
    newer = folder / "tests/test_newer.py"
    newer.write_text("from code_recorded import sign\n")
    try:
        later = Server(folder, "bridge", "tests", out).recorded(folder / FILE, line_of("return -1"), [])
    finally:
        newer.unlink()
    assert later == [f"{T}test_negative", "tests/test_newer.py"]


def test_doctests_of_the_file_come_first(repository):
    folder, out = repository
    server = Server(folder, "bridge", "tests", out)
    server.doctests = lambda path: [path.name]
    assert server.recorded(folder / FILE, line_of("return -1"), []) == ["code_recorded.py", f"{T}test_negative"]
    assert Server(folder, "bridge", "tests", out).doctests(folder / FILE) == []


def test_marks_change_no_result_and_stand_behind_docstrings_and_imports_from_the_future():
    text = marked(SOURCE, FILE)
    module: dict = {"__name__": "marked"}
    exec(compile(text, FILE, "exec"), module)
    assert module["__doc__"] == "A module." and module["sign"].__doc__ == "-1, 0 or 1."
    assert [module["sign"](x) for x in (-2, 0, 3)] == [-1, 0, 1] and module["Counter"]().total == 3
    assert text.count("_rl_fn_entered(") == 10


def test_blocks_of_a_line_the_innermost_first():
    assert block_of(SOURCE, line_of("x -= 1")) == [line_of("x -= 1"), line_of("while x"), line_of("if x > 0")]


def test_quick_tests_about_little_come_first_and_no_block_has_more_than_it_can_use():
    entered = {"a:1": {"slow", "wide", "quick"}, "a:2": {"wide"}, "a:3": {"wide"}, "a:4": {"of no time that is known"}}
    told = tables(entered, {"slow": 60.0, "wide": 0.1, "quick": 0.1})
    assert [told["tests"][number] for number in told["blocks"]["a:1"]] == ["quick", "wide", "slow"]
    assert told["blocks"]["a:4"] == []
    many = {"a:1": {f"t{n}" for n in range(1000)}}
    assert len(tables(many, dict.fromkeys(many["a:1"], 0.1))["blocks"]["a:1"]) == 300


def test_some_cases_of_every_test_come_before_more_of_any():
    tests = [f"t::a[{n}]" for n in range(5)] + ["t::b"]
    assert of_each_some(tests) == ["t::a[0]", "t::a[1]", "t::a[2]", "t::b", "t::a[3]", "t::a[4]"]


def test_a_default_is_met_where_the_function_begins():
    source = 'def f(x, y=1):\n    """Documented."""\n    return x + y\n\n\ndef g(z=2): return z\n'
    assert {(m.kind, m.line, m.runs) for m in mutants(source, "a.py")[1]} == {
        ("default", 1, 3),
        ("arithmetic", 3, 3),
        ("default", 6, 6),
    }
