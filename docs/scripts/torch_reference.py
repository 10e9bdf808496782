"""Pages of the reference for what needs PyTorch: read from the sources, so that the site is built without it."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from docs.scripts.reference import ROOT, call, section

# Page of the reference: where its names come from, and their folder.
PACKAGES = {
    "rl_kernels": ("rl_kernels", ROOT / "kernels/rl_kernels"),
    "functional": ("rl_bridge.functional", ROOT / "bridge/rl_bridge/functional"),
}
TITLES = {"rl_kernels": "Kernels", "functional": "JAX functions in PyTorch"}
ROOTS = {"rl_kernels": ROOT / "kernels/rl_kernels", "rl_bridge": ROOT / "bridge/rl_bridge"}
EQUATION = re.compile(r"^[\w, ]{1,14} = ")
Definition = ast.FunctionDef | ast.ClassDef


def imported(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names that a package's __init__.py takes from its own modules, and the file or folder each comes from."""
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and folder.name in node.module.split("."):
            parts = node.module.split(".")
            inside = parts[parts.index(folder.name) + 1 :]
            for alias in node.names:
                yield alias.asname or alias.name, folder.joinpath(*inside)


def definition(name: str, place: Path) -> tuple[Definition, Path]:
    """The function or class of that name, through any number of packages that import it."""
    if place.is_dir():
        return definition(name, dict(imported(place))[name])
    file = place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == name:
            return node, file
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in {alias.asname or alias.name for alias in node.names}
        ):
            package, *inside = node.module.split(".")
            return definition(name, ROOTS[package].joinpath(*inside))
    raise ValueError(f"{file} does not define {name}")


def words(node: Definition) -> list[str]:
    """Arguments with their defaults, without annotations; of a class, its fields."""
    if isinstance(node, ast.ClassDef):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        return [ast.unparse(f.target) + (f"={ast.unparse(f.value)}" if f.value else "") for f in fields]
    a = node.args
    plain = [arg.arg for arg in [*a.posonlyargs, *a.args]]
    for i, default in enumerate(reversed(a.defaults), start=1):
        plain[-i] += f"={ast.unparse(default)}"
    if a.vararg or a.kwonlyargs:
        plain.append(f"*{a.vararg.arg if a.vararg else ''}")
    for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        plain.append(arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}")
    return plain + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def paragraphs(node: Definition) -> list[str]:
    """The docstring cut at its empty lines, with single backticks."""
    text = inspect.cleandoc(ast.get_docstring(node) or "").replace("``", "`")
    return [part for part in text.split("\n\n") if part.strip()]


def names(folder: Path) -> list[str]:
    """What the package exports."""
    found = re.search(r"__all__ = (\[.*?\])", (folder / "__init__.py").read_text(encoding="utf-8"), flags=re.DOTALL)
    return ast.literal_eval(found[1]) if found else []


def pages() -> dict[str, str]:
    """All pages by their file name."""
    made = {}
    for page, (package, folder) in PACKAGES.items():
        about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        lines = [f"# {TITLES[page]}", "", " ".join(about.split("\n\n")[0].split()), ""]
        places = dict(imported(folder))
        for name in names(folder):
            node, file = definition(name, places[name])
            source = file.relative_to(ROOT).as_posix()
            parts, arguments = paragraphs(node), words(node)
            terms = [word.split("=")[0] for word in arguments] if EQUATION.match("".join(parts[1:2])) else None
            lines.append(section(name, parts, call(f"{package}.{name}", arguments), source, {}, terms))
        made[f"{page}.md"] = "\n".join(lines)
    return made
