"""Marks of the user's functions, objects and files, which a resumed run compares: other content has another mark."""

import ast
import contextlib
import ctypes
import enum
import functools
import hashlib
import importlib.machinery
import inspect
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

_OWN = ("rl_fn", "rl_kernels", "rl_bridge", "rl_train", "rl_tools")
_INSTALLED = {"site-packages", "dist-packages"}
_STDLIB = sysconfig.get_paths()["stdlib"]
_LONGEST = 160
"""Characters of a mark before it is cut; a hash of the whole follows then."""
_DEEPEST, _MOST_AGAIN = 60, 10_000
"""Objects in one another, and visits of the same objects on other ways, after which an object's type stands for it."""
_PLAIN = (bool, int, float, complex, str, bytes, bytearray)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+|\b0x[0-9a-f]{9,}", flags=re.IGNORECASE)


def mark_of(function: Any) -> str:
    """The name of a function or class of the user's, and a hash of its file with the modules that the file imports.

    Behind it stands a hash of what a partial adds, of an object's fields where it is of a dataclass, of the object that
    a method belongs to, and of the values that a function has from the functions around it. What has no file, as a
    class of a notebook, and what is this library's own is known by its name alone. No value stands there as text.
    """
    mark = _Marks().mark(function)
    return mark if len(mark) <= _LONGEST else f"{mark[:_LONGEST]}…{_hash(mark)}"


def _hash(content: str | bytes) -> str:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]


class _Marks:
    """One mark: what is met on the way to its end.

    The text of a value is the same in every process: no address, no order of a set or a mapping.
    """

    def __init__(self) -> None:
        self._way: list[int] = []
        """Ids of the objects around: an object that leads back to itself ends there."""
        self._cut = 0
        """Least depth to which a text refers, among those being made."""
        self._texts: dict[int, str] = {}
        """Texts of objects that lead to none of those around them."""
        self._met: dict[int, Any] = {}
        """All objects met, which stay: an id would be another's."""
        self._again = 0
        self._files = functools.cache(content_of)

    def mark(self, function: Any) -> str:
        """The mark, of any length."""
        if isinstance(function, functools.partial):
            return f"{self.mark(function.func)}({_hash(self.text([function.args, function.keywords]))})"
        names = None if isinstance(function, type) else _fields_of(function)
        if names is not None:
            return f"{self._name(type(function))}({self._of_fields(function, names)})"
        # An object that is called has the source of its class, a decorated function its own.
        is_named = inspect.isroutine(function) or inspect.isclass(function)
        return self._name(_unwrapped(function)) + self._around(function) if is_named else self._name(type(function))

    def _name(self, definition: Any) -> str:
        """The name of a function or class, and a hash of the file that defines it."""
        module = getattr(definition, "__module__", None) or ""
        name = getattr(definition, "__qualname__", type(definition).__qualname__)
        if module.split(".")[0] in ("", "builtins", *_OWN):
            return f"{module}.{name}"
        try:
            file = inspect.getsourcefile(definition)
        except (OSError, TypeError):
            file = None
        content = self._files(Path(file))[:16] if file is not None and Path(file).is_file() else ""
        return f"{name}:{content}"

    def _around(self, function: Any) -> str:
        """A hash of the object that a method belongs to, and of a function's values from the functions around it."""
        parts = []
        owner = getattr(function, "__self__", None) if inspect.isroutine(function) else None
        if owner is not None and (isinstance(owner, type) or self._is_content(owner)):
            parts.append(self.text(owner))
        layer: Any = function
        for _ in range(_DEEPEST):  # a decorator's function may wrap itself
            layer = getattr(layer, "__func__", layer)
            names = getattr(getattr(layer, "__code__", None), "co_freevars", ())
            cells = [
                (name, _in(cell)) for name, cell in zip(names, getattr(layer, "__closure__", None) or (), strict=False)
            ]
            parts += [f"{name}={self.text(value)}" for name, value in cells if self._is_content(value)]
            layer = getattr(layer, "__wrapped__", None)
        return f"({_hash(' '.join(parts))})" if parts else ""

    def _is_content(self, value: Any) -> bool:
        """Whether a value that a function has beside its file is content: not an open connection, nor a model."""
        kinds = (*_PLAIN, Mapping, AbstractSet, list, tuple, deque, enum.Enum, PurePath, re.Pattern, SimpleNamespace)
        try:
            is_known = value is None or isinstance(value, (*kinds, functools.partial)) or _is_array(value)
            return is_known or _fields_of(value) is not None or inspect.isroutine(value) or inspect.isclass(value)
        except Exception:  # of a stand-in for an object that is not there
            return False

    def text(self, value: Any) -> str:
        """A text of the value, short where the value is not."""
        if value is None:
            return "None"
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            base: Any = next(base for base in _PLAIN if isinstance(value, base))
            one: Any = value
            # Python writes no decimal of some thousand digits.
            plain: str = base.__format__(one, "#x") if base is int else base.__repr__(one)
            return _short(plain if type(value) is base else f"{type(value).__qualname__} {plain}")
        place = id(value)
        if place in self._texts:
            return self._texts[place]
        if place in self._way:
            self._cut = min(self._cut, self._way.index(place))
            return "…"
        self._again += place in self._met
        self._met[place] = value
        if len(self._way) >= _DEEPEST or self._again > _MOST_AGAIN:
            return type(value).__qualname__
        before, self._cut = self._cut, len(self._way)
        self._way.append(place)
        try:
            text = _short(self._content(value))
        except Exception:  # of the user's class, whose methods may raise whatever they like
            text = type(value).__qualname__
        self._way.pop()
        if self._cut >= len(self._way):
            self._texts[place] = text
        self._cut = min(before, self._cut)
        return text

    def _content(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name} {self.text(value.value)}"
        if isinstance(value, Mapping):
            return f"mapping {sorted((self.text(key), self.text(item)) for key, item in value.items())}"
        if isinstance(value, AbstractSet):
            return f"set {sorted(map(self.text, value))}"
        if isinstance(value, list | tuple | deque):
            return str([self.text(item) for item in value])
        if isinstance(value, re.Pattern):
            return f"pattern {self.text(value.pattern)} {value.flags}"
        if _is_array(value):
            return self._of_array(value)
        if isinstance(value, memoryview):
            return f"{value.format} {value.shape} {_hash(value.tobytes())}"
        if isinstance(value, SimpleNamespace):
            return f"namespace {self._content(vars(value))}"
        if callable(value) or _fields_of(value) is not None:
            return self.mark(value)
        text = repr(value)
        return type(value).__qualname__ if _ADDRESS.search(text) else text

    def _of_fields(self, value: Any, names: Sequence[str]) -> str:
        present = []
        for name in names:
            with contextlib.suppress(Exception):  # not set yet; or a property that raises what it likes
                present.append((name, self.text(getattr(value, name))))
        return _hash(str(present))

    def _of_array(self, array: Any) -> str:
        """The text of an array of numpy's, JAX's or torch's; that of ``repr`` leaves out a large one's middle."""
        torch: Any = sys.modules.get("torch")
        about = f"array {array.dtype} {tuple(array.shape)}"
        if torch is None or not isinstance(array, torch.Tensor):
            # Objects and texts of any length lie elsewhere: the array holds their addresses.
            is_elsewhere = getattr(array.dtype, "hasobject", False) or getattr(array.dtype, "kind", "") == "T"
            return f"{about} {self.text(array.tolist()) if is_elsewhere else _hash(array.tobytes())}"
        tensor = array.detach().to_dense() if array.layout != torch.strided else array.detach()
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        # By its address: numpy need not be there, and has no bfloat16.
        return f"{about} {_hash(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b'')}"


def _short(text: str) -> str:
    """The text, or a hash of a longer one."""
    return text if len(text) <= 64 else f"#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _unwrapped(function: Any) -> Any:
    """The function that decorators have wrapped."""
    try:
        return inspect.unwrap(function)
    except ValueError:  # it wraps itself
        return function


def _in(cell: Any) -> Any:
    """The content of a closure's cell; an object of no kind where nothing has been set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return object()


def _is_array(value: Any) -> bool:
    """Whether this is an array of numpy or JAX, or a tensor of torch."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return True
    return all(hasattr(type(value), name) for name in ("dtype", "shape", "tobytes"))


def _fields_of(value: Any) -> list[str] | None:
    """The names of an object's fields, of those that count where two are compared; None where it has no such."""
    kind = type(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in fields(value) if field.compare]
    if (of_attrs := getattr(kind, "__attrs_attrs__", None)) is not None:
        return [attribute.name for attribute in of_attrs if attribute.eq]
    of_pydantic = getattr(kind, "model_fields", None) if hasattr(kind, "__pydantic_complete__") else None
    return None if of_pydantic is None else list(of_pydantic)


def content_of(file: Path) -> str:
    """A hash of the file and of all modules of the user's that it imports, wherever they lie."""
    parts = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sources_of(file)]
    return hashlib.sha256("\n".join([parts[0].rpartition(" ")[2], *sorted(parts[1:])]).encode()).hexdigest()


def sources_of(file: Path, search: Sequence[str] | None = None) -> list[Path]:
    """The file and all modules of the user's that it imports, wherever in it, and those that these import.

    They are found by their names, beside the file first and then in the folders ``search``, by default where Python
    looks; nothing is run. Modules of Python, of installed packages and of this library are not the user's. What is
    imported by a computed name is not found.
    """
    sources: dict[Path, None] = {}
    waiting = [file.resolve()]
    folders = [str(file.resolve().parent), *(sys.path if search is None else search)]
    while waiting:
        path = waiting.pop(0)
        if path in sources:
            continue
        sources[path] = None
        try:
            imports = _imports_in(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # loading the file says what is wrong with it
            continue
        for name in _imported(imports, path, folders):
            waiting += _files_of(name, folders)
    return list(sources)


class _Import(NamedTuple):
    """``from module import names``, with ``level`` dots before the module; ``import names`` without a module."""

    level: int
    module: str | None
    names: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def _imports_in(source: bytes) -> list[_Import]:
    """All imports of a source: the marks of many objects read the same few files."""
    imports = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports.append(_Import(0, None, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            imports.append(_Import(node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return imports


def _imported(imports: Iterable[_Import], path: Path, folders: list[str]) -> Iterator[str]:
    """Absolute names of what may be a module: of ``from a import b`` both ``a`` and ``a.b``."""
    for level, module, names in imports:
        if module is None:
            yield from names
            continue
        base = module
        if level:
            package = _package_of(path, folders)
            base = ".".join([*package[: len(package) - level + 1], *([base] if base else [])])
        if base:
            yield base
            yield from (f"{base}.{name}" for name in names)


def _package_of(path: Path, folders: list[str]) -> list[str]:
    """Names of the packages that a module lies in."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file() and str(folder) not in folders:
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _files_of(name: str, folders: list[str]) -> list[Path]:
    """The user's files that an import of ``name`` runs: its packages' and its own."""
    if name.partition(".")[0] in _OWN:
        return []
    files: list[Path] = []
    places, full = folders, ""
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        spec = importlib.machinery.PathFinder.find_spec(full, places)
        if spec is None:
            break
        if spec.origin is not None and spec.has_location:
            origin = Path(spec.origin).resolve()
            if not _INSTALLED.isdisjoint(origin.parts) or origin.is_relative_to(_STDLIB):
                break
            files.append(origin)
        locations: Any = spec.submodule_search_locations or []
        # A namespace package looks its parents up among the modules that are loaded.
        places = list(getattr(locations, "_path", locations))
        if not places:
            break
    return files
