"""A test does not end before it has asserted anything: what does not apply is filtered from its parameters."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
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


def test_make_test_vllm_collects_every_test_that_needs_vllm():
    """It reads the files with the word alone: a mark that a helper gives must come from a folder of this name."""
    for path in TESTS.rglob("*.py"):
        if "mark.vllm" in path.read_text("utf-8") and path != Path(__file__):
            within = path.relative_to(TESTS)
            assert within.parts[0] == "bridge" and (path.name.startswith("test_") or "vllm" in within.parts[:-1]), path
