"""Put a mutant into functions that are already loaded, without importing anything again.

The code object of the living function is exchanged, so every name that refers to it, in whatever module, table or
dataclass, runs the mutant; the type-checking wrapper of the tests stays around it. Compiled JAX operations stay warm.
"""

import ast
import contextlib
import gc
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.mutation import by_hand
from tests.mutation.mutants import Mutant, mutants


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _chain(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


class Package:
    """The files of a package, their mutants and the means to apply one."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self.trees: dict[str, ast.Module] = {}
        self.sources: dict[str, list[str]] = {}
        self.mutants: dict[str, Mutant] = {}
        for path in sorted(folder.rglob("*.py")):
            file = path.relative_to(folder).as_posix()
            source = path.read_text(encoding="utf-8")
            self.sources[file] = source.splitlines()
            tree, found = mutants(source, file)
            self.trees[file] = tree
            self.mutants |= {mutant.id: mutant for mutant in found}
        self._closures: dict[tuple[str, str], list[types.FunctionType]] | None = None

    def add(self, entries: list[dict[str, str]], root: Path) -> list[Mutant]:
        """The faults that are written by hand, as mutants of this package."""
        found = []
        for entry in entries:
            file = (root / entry["file"]).relative_to(self.folder).as_posix()
            source = (root / entry["file"]).read_text(encoding="utf-8")
            found.append(by_hand.mutant(entry, self.trees[file], source, file))
        self.mutants |= {mutant.id: mutant for mutant in found}
        return found

    def source(self, mutant: Mutant) -> str:
        """The text of the mutant's file with the mutant in it."""
        with mutant.set():
            return ast.unparse(self.trees[mutant.file])

    def module(self, file: str) -> types.ModuleType:
        parts = file.removesuffix(".py").removesuffix("__init__").strip("/").split("/")
        return importlib.import_module(".".join([self.package, *filter(None, parts)]))

    def closures(self) -> dict[tuple[str, str], list[types.FunctionType]]:
        """Inner functions that a test module made when it was imported; they hold their own code."""
        if self._closures is None:
            self._closures = {}
            for x in gc.get_objects():
                if type(x) is types.FunctionType and "<locals>" in x.__code__.co_qualname:
                    file = Path(x.__code__.co_filename)
                    if file.is_relative_to(self.folder):
                        name = file.relative_to(self.folder).as_posix()
                        self._closures.setdefault((name, x.__code__.co_qualname), []).append(x)
        return self._closures

    def function(self, file: str, owner: str) -> types.FunctionType:
        """The undecorated function behind a name."""
        found: Any = self.module(file)
        for part in owner.split("."):
            found = inspect.getattr_static(found, part)
            found = getattr(found, "__func__", getattr(found, "fget", found))
        return list(_chain(found))[-1]

    @contextlib.contextmanager
    def applied(self, mutant: Mutant) -> Iterator[None]:
        if not mutant.owner:
            undo = self._constant(mutant)
        elif mutant.default_of is not None:
            undo = self._default(mutant)
        elif mutant.owner[0].isupper() and "." not in mutant.owner:
            undo = self._class_attribute(mutant)
        else:
            undo = self._code(mutant)
        try:
            yield
        finally:
            undo()

    def _code(self, mutant: Mutant) -> Callable[[], None]:
        with mutant.set():
            module = compile(self.trees[mutant.file], str(self.folder / mutant.file), "exec", dont_inherit=True)
        new = {code.co_qualname: code for code in _codes(module)}
        target = self.function(mutant.file, mutant.owner)
        changed = [(target, target.__code__)]
        for (file, qualname), functions in self.closures().items():
            if file == mutant.file and qualname.startswith(mutant.owner + ".<locals>"):
                changed += [(f, f.__code__) for f in functions if new[qualname].co_freevars == f.__code__.co_freevars]
        for function, old in changed:
            function.__code__ = new[old.co_qualname]

        def undo() -> None:
            for function, old in changed:
                function.__code__ = old

        return undo

    def _default(self, mutant: Mutant) -> Callable[[], None]:
        node = mutant.default_of
        assert isinstance(node, ast.FunctionDef)
        target = self.function(mutant.file, mutant.owner)
        defaults, keywords = target.__defaults__, dict(target.__kwdefaults__ or {})
        with mutant.set():
            names = [argument.arg for argument in node.args.kwonlyargs]
            given = zip(names, node.args.kw_defaults, strict=True)
            target.__kwdefaults__ = {name: self._value(mutant, x) for name, x in given if x is not None}
            target.__defaults__ = tuple(self._value(mutant, x) for x in node.args.defaults)

        def undo() -> None:
            target.__defaults__, target.__kwdefaults__ = defaults, keywords

        return undo

    def _value(self, mutant: Mutant, node: ast.expr, names: dict[str, Any] | None = None) -> Any:
        return eval(compile(ast.Expression(node), mutant.file, "eval"), vars(self.module(mutant.file)) | (names or {}))

    def _statement(self, mutant: Mutant, body: list[ast.stmt]) -> tuple[str, ast.expr]:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= mutant.line <= (node.end_lineno or 0):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                assert isinstance(target, ast.Name) and node.value is not None
                return target.id, node.value
        raise LookupError(mutant.id)

    def owner(self, mutant: Mutant) -> str:
        """The function or class around a mutant, or else the module's constant."""
        return mutant.owner or self._statement(mutant, self.trees[mutant.file].body)[0]

    def _constant(self, mutant: Mutant) -> Callable[[], None]:
        """The other constants of the file that are made of this one are made again."""
        new: dict[str, Any] = {}
        with mutant.set():
            body = self.trees[mutant.file].body
            first = self._statement(mutant, body)[0]
            for node in body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                    if isinstance(target, ast.Name) and (target.id == first or used & new.keys()):
                        new[target.id] = self._value(mutant, node.value, new)
        module = self.module(mutant.file)
        held = [
            (m, name, old)
            for name in new
            for old in [getattr(module, name)]
            for m in list(sys.modules.values())
            if getattr(m, "__dict__", {}).get(name) is old
        ]
        for holder, name, _ in held:
            setattr(holder, name, new[name])

        def undo() -> None:
            for holder, name, old in held:
                setattr(holder, name, old)

        return undo

    def _class_attribute(self, mutant: Mutant) -> Callable[[], None]:
        """A dataclass's default is in the class and among the defaults of its __init__."""
        with mutant.set():
            classes = [n for n in self.trees[mutant.file].body if isinstance(n, ast.ClassDef)]
            body = next(n.body for n in classes if n.name == mutant.owner)
            name, node = self._statement(mutant, body)
            new = self._value(mutant, node)
        cls = getattr(self.module(mutant.file), mutant.owner)
        old, saved = getattr(cls, name), []
        setattr(cls, name, new)
        for function in _chain(cls.__init__):
            code, defaults = function.__code__, function.__defaults__ or ()
            keywords = function.__kwdefaults__
            if keywords and name in keywords:
                saved.append((function, defaults, dict(keywords)))
                function.__kwdefaults__ = {**keywords, name: new}
            elif name in code.co_varnames[: code.co_argcount] and defaults:
                place = code.co_varnames.index(name) - (code.co_argcount - len(defaults))
                saved.append((function, defaults, keywords))
                function.__defaults__ = (*defaults[:place], new, *defaults[place + 1 :])

        def undo() -> None:
            setattr(cls, name, old)
            for function, defaults, keywords in saved:
                function.__defaults__, function.__kwdefaults__ = defaults or None, keywords

        return undo
