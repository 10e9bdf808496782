"""Tests assert before they end, stand alone, and lie in the rooms of what they test.

A test does not end before it has asserted anything: what does not apply is filtered from its parameters. What two test
files share is in a helper: beside them, or in tests/support where two folders share it.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BRIDGE = TESTS.parent / "bridge"
ACROSS = {
    "bad_inputs": "every command with every bad input, told by name",
    "families": "every family of transformers through all rooms",
    "invariance": "one step in every layout, over every executor",
    "tools": "the rooms of rl_tools",
}
"""Folders of tests/bridge that are no room of rl_bridge, and what they are."""
ELSEWHERE = {
    "tests.bridge.families.zoo": "a family is added in one folder",
    "tests.bridge.tools.tune.tuner": "a program that lies beside its trainer",
}
"""Helpers of a room that other rooms use, too, and why they stay there."""
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def asserts(node: ast.AST) -> bool:
    """Whether the statement holds an assertion: `assert`, `pytest.raises` or a function of ours that asserts."""
    words = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    words |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    named = any(word.startswith(("assert", "check", "raises", "close")) for word in words)
    return named or any(isinstance(n, ast.Assert) for n in ast.walk(node))


def silent_returns(body: list[ast.stmt], asserted: bool = False) -> list[int]:
    """Lines of the returns that nothing is asserted before, on their way through the function's body."""
    found = []
    for statement in body:
        if isinstance(statement, ast.Return):
            found += [] if asserted else [statement.lineno]
        elif not isinstance(statement, FUNCTIONS):
            for name in ("body", "orelse", "finalbody"):
                found += silent_returns(getattr(statement, name, []), asserted)
        asserted = asserted or asserts(statement)
    return found


def early_returns(source: str) -> list[str]:
    """Names and lines of tests that can return before they assert."""
    return [
        f"{test.name}:{line}"
        for test in ast.walk(ast.parse(source))
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_")
        for line in silent_returns(test.body)
    ]


def test_the_search_finds_early_returns():
    source = """
def test_a(x):
    if x:
        return
    assert x == 0
def test_b():
    def helper():
        return 1
    if helper():
        assert True
        return
    assert helper()
"""
    assert early_returns(source) == ["test_a:4"]


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in TESTS.iterdir() if path.is_dir() and path.name[0] != "_")
)
def test_no_test_returns_early(folder):
    found = {
        file.relative_to(TESTS).as_posix(): lines
        for file in sorted((TESTS / folder).rglob("test_*.py"))
        if (lines := early_returns(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def files_that_make_reads(variable: str) -> set[str]:
    """What a variable of the Makefile greps."""
    [line] = re.findall(
        rf"^{variable} = \$\(shell (.*)\)$", (TESTS.parent / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    found = subprocess.run(["sh", "-c", line], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_make_test_vllm_collects_every_test_that_needs_vllm():
    """It reads the files with the word alone: a mark that a helper gives must come from a folder of this name."""
    for path in TESTS.rglob("*.py"):
        if "mark.vllm" in path.read_text("utf-8") and path != Path(__file__):
            within = path.relative_to(TESTS)
            assert within.parts[0] == "bridge" and (path.name.startswith("test_") or "vllm" in within.parts[:-1]), path


@pytest.mark.long
@pytest.mark.parametrize("mark", ["ray", "tools"])
def test_make_collects_every_test_with_a_mark(mark):
    """The files that give the mark, and those that import a helper that does."""
    sources = {path.relative_to(TESTS.parent).as_posix(): path.read_text("utf-8") for path in TESTS.rglob("*.py")}
    sources.pop(Path(__file__).relative_to(TESTS.parent).as_posix())
    giving = {name for name, source in sources.items() if f"mark.{mark}" in source}
    helpers = {name.removesuffix(".py").replace("/", ".") for name in giving if "/test_" not in name}
    needed = {name for name, source in sources.items() if name in giving or modules_imported(source) & helpers}
    tests = {name for name in needed if "/test_" in name}
    assert tests and tests <= files_that_make_reads(f"OF_{mark.upper()}")
    assert needed - tests == giving - tests, "a helper that gives the mark is imported by another helper"


def modules_imported(source: str) -> set[str]:
    """Modules of tests that a source imports, inside of functions too; of `from a import b` both a and a.b."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {name for name in names if name.split(".")[0] == "tests"}


def imports_of_tests(source: str) -> list[str]:
    return sorted(name for name in modules_imported(source) if name.rpartition(".")[2].startswith("test_"))


def test_the_search_finds_imports_of_tests():
    source = "import tests.a.test_b\ndef f():\n    from tests.c import test_d\n    from tests.e.test_f import g\n"
    assert imports_of_tests(source) == ["tests.a.test_b", "tests.c.test_d", "tests.e.test_f"]
    assert imports_of_tests("from tests.a.b import c\nfrom rl_fn import test_x\n") == []


def test_nothing_imports_a_test_file():
    """What is shared moves to a helper: else a test could not be renamed or run without another."""
    files = {path.relative_to(TESTS).as_posix(): path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    assert {name: modules for name, source in files.items() if (modules := imports_of_tests(source))} == {}


def rooms(package: Path) -> set[str]:
    return {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}


def folders(place: Path) -> set[str]:
    return {path.parent.relative_to(place).parts[0] for path in place.rglob("*/*.py")}


def test_tests_of_the_bridge_lie_in_its_rooms():
    assert folders(TESTS / "bridge") - rooms(BRIDGE / "rl_bridge") == set(ACROSS)
    assert folders(TESTS / "bridge/tools") <= rooms(BRIDGE / "rl_tools")


def test_what_two_rooms_of_the_bridge_share_is_in_support():
    shared = set()
    for path in (TESTS / "bridge").rglob("*.py"):
        own = path.relative_to(TESTS).parts[1]
        for name in modules_imported(path.read_text("utf-8")):
            parts = name.split(".")
            file = TESTS.parent.joinpath(*parts).with_suffix(".py")
            if parts[1:2] == ["bridge"] and file.is_file() and parts[2] != own:
                shared.add(name)
    assert shared == set(ELSEWHERE)
