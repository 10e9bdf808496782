"""Modules of other libraries, also where the package around them needs what is not installed."""

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DISTRIBUTIONS = {"trl": "trl", "verl": "verl", "openrlhf": "openrlhf", "tunix": "google-tunix"}


class Absent(ModuleNotFoundError):
    """A library that is not installed."""


def version(library: str) -> str:
    """The installed version; Absent with what to do where there is none."""
    name = DISTRIBUTIONS[library]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise Absent(f"{library} is not installed: see experiments/peers/README.md (make peers)") from None


class Anything(type):
    """The class of stand-in classes: whatever is looked up in one is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Placeholder(types.ModuleType):
    """A module that is not installed, imported at the top of one whose functions need none of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


@contextlib.contextmanager
def placeholders(names: Sequence[str]) -> Iterator[None]:
    """Stand-ins for the named modules that cannot be imported, while another module is loaded."""
    added = [name for name in names if name not in sys.modules]
    sys.modules.update({name: Placeholder(name) for name in added})
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def bare_packages(names: Sequence[str]) -> None:
    """Packages whose __init__ is skipped: it imports engines that the functions beside it do not need."""
    for name in names:
        if name in sys.modules:
            continue
        parent, _, leaf = name.rpartition(".")
        if parent:
            paths = [f"{folder}/{leaf}" for folder in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise Absent(f"{name} is not installed")
            paths = list(spec.submodule_search_locations)
        module = types.ModuleType(name)
        module.__path__ = paths
        sys.modules[name] = module


def load(name: str, *, bare: Sequence[str] = (), stand_ins: Sequence[str] = ()) -> types.ModuleType:
    """The module, without the __init__ of the bare packages and with stand-ins for what is not installed."""
    bare_packages(bare)
    with placeholders(stand_ins):
        return importlib.import_module(name)


def run_branch(function: Callable[..., Any], mentions: str, assigns: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the first `if` or `for` of an installed function whose head mentions a text and whose body sets a name.

    Some trainers compute in the middle of a long method. Their own statement is taken out of their own source and run
    on the given names, so that what is compared is what they ship. Returns the names it leaves behind.
    """
    plain = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.For):
            continue
        if mentions not in ast.unparse(node.test if isinstance(node, ast.If) else node.iter):
            continue
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if assigns in stored:
            names = {**plain.__globals__, **given}
            exec(compile(ast.Module([node], []), inspect.getfile(plain), "exec"), names)
            return names
    raise LookupError(f"{plain.__qualname__} has no branch on {mentions!r} that sets {assigns!r}")
