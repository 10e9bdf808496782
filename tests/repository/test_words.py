"""Words: a docstring begins with what a thing is or does, and a variable's name says what its value is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BRIDGE = Path(__file__).parents[2] / "bridge"
UNREAD = (
    *("rl_bridge/rollout/ahead/ledger.py", "rl_bridge/rollout/decoder.py", "rl_bridge/rollout/worker.py"),
    *("rl_bridge/rollout/served/process.py", "rl_bridge/rollout/served/served_engine.py"),
    "rl_bridge/rollout/vllm/vllm_decoder.py",
)
"""Files and rooms whose words are still to do. This list only shrinks."""
OPENINGS = ("As", "Of", "What")
"""First words of a docstring after which a reader does not know yet what is described."""
EMPTY = {
    *("asked", "found", "given", "gone", "held", "kept", "known", "made", "mine", "said", "seen", "sent", "shown"),
    *("taken", "theirs", "told", "tried", "wanted"),
}
"""Names that fit any value."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def badly_opened(source: str) -> list[str]:
    """Docstrings that begin with one of ``OPENINGS``, by line."""
    return [
        f"{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(ast.parse(source))
        if text.split() and text.split()[0].rstrip(",:") in OPENINGS
    ]


def empty_names(source: str) -> list[str]:
    """Variables of functions whose names are in ``EMPTY``, by line; arguments are left out."""
    lines = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY - arguments:
                    lines.add((node.lineno, node.id))
    return [f"{line}: {name}" for line, name in sorted(lines)]


def files() -> dict[str, str]:
    """Path below ``bridge`` → text, of the files that are not in ``UNREAD``."""
    paths = {path.relative_to(BRIDGE): path for path in sorted(BRIDGE.glob("rl_*/**/*.py"))}
    return {
        str(name): path.read_text()
        for name, path in paths.items()
        if not any(name.is_relative_to(unread) for unread in UNREAD)
    }


@pytest.mark.parametrize("search", [badly_opened, empty_names], ids=["docstrings", "variables"])
def test_the_words_of_files_that_are_done(search):
    assert {name: lines for name, text in files().items() if (lines := search(text))} == {}


def test_the_search_sees_bad_words():
    source = '''
"""What a file is."""
LIMIT = 1
"""Of tokens."""


class Box:
    """As a bag."""

    size: int
    """Official size, which begins with no word of the list."""


def open_box(given):
    """Opens the box."""
    given = list(given)
    found = [kept for kept in given]
    if told := len(found):
        return told
'''
    assert badly_opened(source) == ["2: What a file is.", "4: Of tokens.", "8: As a bag."]
    assert empty_names(source) == ["17: found", "17: kept", "18: told"]
