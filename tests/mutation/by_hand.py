"""Faults written by hand, of the kind a good engineer makes: by_hand/*.toml says where, what and why.

A fault names its file from the repository's root, a text that is there once, what stands there instead, and what kind
of mistake that is. A test holds the list to the code, so that it cannot rot.
"""

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant

FOLDER = Path(__file__).with_name("by_hand")
FIELDS = {"file", "before", "after", "why"}
KIND = "by hand"


def read(package: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    """The faults of a package, checked for their four fields."""
    found = [x for path in sorted(folder.glob("*.toml")) for x in tomllib.loads(path.read_text("utf-8"))["fault"]]
    for entry in found:
        if set(entry) != FIELDS or not all(str(value).strip() or key == "after" for key, value in entry.items()):
            raise ValueError(f"a fault has {sorted(FIELDS)}, got {entry}")
    return [entry for entry in found if f"/{entry['file']}".rsplit("/", 1)[0].find(f"/{package}") >= 0]


def wrong(entry: dict[str, str], root: Path) -> str:
    """Why a fault cannot be planted, or nothing."""
    path = root / entry["file"]
    if not path.exists():
        return "no such file"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(entry["before"])) != 1:
        return f"`before` is there {count} times"
    planted = source.replace(entry["before"], entry["after"])
    try:
        same = ast.dump(ast.parse(planted)) == ast.dump(ast.parse(source))
    except SyntaxError as error:
        return f"a syntax error: {error}"
    return "nothing changes" if same else ""


def _owner(tree: ast.Module, line: int) -> tuple[str, ast.FunctionDef | None]:
    """The module-level function, `Class.method`, `Class` or "" around a line, and its definition."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            if isinstance(node, ast.FunctionDef):
                return node.name, node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.lineno <= line <= (inner.end_lineno or 0):
                    return f"{node.name}.{inner.name}", inner
            return node.name, None
    return "", None


def _definition(tree: ast.Module, owner: str) -> ast.FunctionDef | None:
    """The function of that name in the tree."""
    body: list[ast.stmt] = tree.body
    for part in owner.split(".")[:-1]:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part)
    name = owner.split(".")[-1]
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def mutant(entry: dict[str, str], tree: ast.Module, source: str, file: str) -> Mutant:
    """A fault as a mutant of the file's tree: inside it the tree has the body of the faulty source."""
    start = source.index(entry["before"])
    line = source.count("\n", 0, start) + 1
    new = ast.parse(source.replace(entry["before"], entry["after"]))
    owner, definition = _owner(tree, line)
    planted = _definition(new, owner) if definition is not None else None
    same = definition is None or planted is None or ast.dump(planted.args) == ast.dump(definition.args)

    def change() -> Callable[[], None]:
        old: Any = tree.body
        tree.body = new.body
        return lambda: setattr(tree, "body", old)

    span = tuple(range(line, line + entry["before"].count("\n") + 1))
    column = start - (source.rfind("\n", 0, start) + 1)
    text = source.splitlines()[line - 1].strip()
    default_of = None if same else planted
    return Mutant(file, line, column, KIND, owner, entry["before"], entry["after"], span, change, default_of, text, 0)
