"""A Python file of the user's as a module: a reward's, an environment's."""

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_OWN = ("rl_fn", "rl_kernels", "rl_bridge", "rl_train", "rl_tools")
_INSTALLED = {"site-packages", "dist-packages"}
_BEGIN_PROCESSES = ("reward", "environment")
_kinds: dict[str, str] = {}
"""Name of a module that a file was loaded as in this process → its kind. A file may hold a reward and a tool."""
_folders: set[Path] = set()
"""Folders that files were loaded from in this process."""


def load_file(path: Path, kind: str) -> ModuleType:
    """The file as a module. The file can import the modules that lie beside it. ``kind`` is what it holds: "reward".

    A reward's or an environment's module has the file's name, where that name finds the file: a process that its
    functions begin (``multiprocessing``, by spawn) imports the module by that name.

    Raises:
        FileNotFoundError: no such file.
        PermissionError: this user may not read it.
        ValueError: the file fails to load, or exits.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such {kind} file: {path}")
    is_free = path.stem not in sys.modules or _kinds.get(path.stem) == kind
    is_found = kind in _BEGIN_PROCESSES and is_free and _finds(path.stem, path.resolve())
    name = path.stem if is_found else f"rl_bridge_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, among others, look their own module up.
    sys.modules[spec.name] = module
    _kinds[spec.name] = kind
    try:
        with _neighbours(path.resolve().parent), the_users_code():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(spec.name, None)
        if isinstance(error, PermissionError) and str(error.filename) == str(path.absolute()):
            raise
        relative = "relative import" in str(error)
        way_on = "; a module beside the file is imported by its name: import NAME" if relative else ""
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}{way_on}") from error
    return module


def _finds(name: str, file: Path) -> bool:
    """Whether an import of ``name`` in another process, with this one's path, runs the file and no other module."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return False
    folder = str(file.parent)
    importlib.invalidate_caches()
    spec = importlib.machinery.PathFinder.find_spec(name, [*(entry for entry in sys.path if entry != folder), folder])
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


@contextmanager
def the_users_code() -> Iterator[None]:
    """While a function of the user's runs in this thread: it can neither end the process unseen nor move it.

    ``os._exit`` raises SystemExit instead, whatever the status. The working directory, whether torch records gradients,
    and torch's default dtype are what they were afterwards.
    """
    torch: Any = sys.modules.get("torch")  # a reward's own process has none
    gradients = torch is None or torch.is_grad_enabled()
    with _at_work.lock:
        if not _at_work.calls:
            _at_work.place = _place()
            _at_work.dtype = None if torch is None else torch.get_default_dtype()
        _at_work.calls += 1
    try:
        with only_the_users_code():
            yield
    finally:
        if torch is not None:
            torch.set_grad_enabled(gradients)
        with _at_work.lock:
            _at_work.calls = max(0, _at_work.calls - 1)  # a forked child begins at 0
            if _at_work.place is not None and _place() != _at_work.place:
                _chdir(_at_work.place)
            if torch is not None and _at_work.dtype not in (None, torch.get_default_dtype()):
                torch.set_default_dtype(_at_work.dtype)


@contextmanager
def only_the_users_code() -> Iterator[None]:
    """While this thread runs functions of the user's: ``os._exit`` raises SystemExit."""
    _inside.calls = getattr(_inside, "calls", 0) + 1
    try:
        yield
    finally:
        _inside.calls -= 1


_OF_A_THREAD = {
    "builtins.ValueError": ("signal only works in main thread", "set_wakeup_fd only works in main thread"),
    "builtins.RuntimeError": (
        "There is no current event loop in thread",
        "set_wakeup_fd only works in main thread",  # asyncio's add_signal_handler
        "main thread is not in main loop",  # tkinter
    ),
    "builtins.AttributeError": ("'_thread._local' object has no attribute",),
    "sqlite3.ProgrammingError": ("SQLite objects created in a thread can only be used in that same thread",),
    "greenlet.error": ("cannot switch to a different thread", "Cannot switch to a different thread"),
}
"""Type of an error → how its message begins."""


def belongs_to_a_thread(error: BaseException) -> bool:
    """Whether an error says that the call is for another thread: the main one, or the one that made an object.

    The type and the beginning of the message decide: other errors may quote a text that speaks of threads.

    >>> belongs_to_a_thread(ValueError("signal only works in main thread of the main interpreter"))
    True
    >>> belongs_to_a_thread(KeyError("signal only works in main thread"))
    False
    """
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return str(error).startswith(_OF_A_THREAD.get(kind, ()))


def _leave(status: int) -> None:
    """``os._exit``, but where a function of the user's calls it: a run would end with status 0 and without a word."""
    # A child that the function has forked ends as it wants to.
    if os.getpid() == _here and getattr(_inside, "calls", 0):
        raise SystemExit(f"os._exit({status})")
    _exit(status)


def _place() -> str | None:
    """The working directory; None where a function has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def chdir(path: Any) -> None:
    """``os.chdir``; see ``_keep_place``."""
    _chdir(path)
    _keep_place()


def fchdir(fd: Any) -> None:
    """``os.fchdir``; see ``_keep_place``."""
    _fchdir(fd)
    _keep_place()


def _keep_place() -> None:
    """Keep what the program itself chooses while functions of the user's are at work, in the main thread alone.

    A function may change the directory in a thread of its own, too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and os.getpid() == _here and not getattr(_inside, "calls", 0):
        with _at_work.lock:
            _at_work.place = _place()


def _now_here() -> None:
    """A forked child is a process of its own, with nothing of the user's on its way but what forked it."""
    global _here
    _here = -1
    _at_work.lock, _at_work.calls = threading.Lock(), 0  # another thread of the parent may have had the lock


class _AtWork:
    """How many threads are in functions of the user's, and what was set in the process before the first."""

    lock, calls = threading.Lock(), 0
    place: str | None = None
    dtype: Any = None


_at_work, _inside = _AtWork(), threading.local()
_here, _exit = os.getpid(), os._exit
os._exit = _leave  # type: ignore[assignment]
_chdir, _fchdir = os.chdir, os.fchdir
os.chdir, os.fchdir = chdir, fchdir
os.supports_fd.add(chdir)
os.register_at_fork(after_in_child=_now_here)


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Modules in the folder can be imported: first of all while the file is loaded, afterwards last of all."""
    # A neighbour of another file may have the same name.
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        is_here = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        if is_here and origin and not {*Path(origin).parents[:2]}.isdisjoint(_folders - {folder}):
            del sys.modules[name]
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
        sys.path.append(str(folder))  # for what the file's functions import when they are called


def mark_of(function: Any) -> str:
    """The name of a function or class of the user's, and a hash of its file with the modules that the file imports.

    A partial has its arguments, too, and an object of a dataclass a hash of its fields. What has no file, as a class of
    a notebook, and what is this library's own is known by its name alone.
    """
    if isinstance(function, functools.partial):
        return f"{mark_of(function.func)}{_plain(function.args)}{_plain(function.keywords)}"
    if is_dataclass(function) and not isinstance(function, type):
        fields_of = {field.name: getattr(function, field.name) for field in fields(function) if field.compare}
        return f"{mark_of(type(function))}({hashlib.sha256(repr(_plain(fields_of)).encode()).hexdigest()[:16]})"
    # An object that is called has the source of its class, a decorated function its own.
    is_named = inspect.isroutine(function) or inspect.isclass(function)
    definition: Any = inspect.unwrap(function) if is_named else type(function)
    module = getattr(definition, "__module__", None) or ""
    name = getattr(definition, "__qualname__", type(definition).__qualname__)
    if module.split(".")[0] in ("", "builtins", *_OWN):
        return f"{module}.{name}"
    try:
        file = inspect.getsourcefile(definition)
    except (OSError, TypeError):
        file = None
    content = content_of(Path(file))[:16] if file is not None and Path(file).is_file() else ""
    return f"{name}:{content}"


def _plain(value: Any) -> Any:
    """A value whose text is the same in every process: no address, and no order of a set."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(_plain, value)))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return mark_of(value) if callable(value) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


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
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # loading the file says what is wrong with it
            continue
        for name in _imported(tree, path, folders):
            waiting += _files_of(name, folders)
    return list(sources)


def _imported(tree: ast.Module, path: Path, folders: list[str]) -> Iterator[str]:
    """Absolute names of what may be a module: of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = _package_of(path, folders)
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


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
            if not _INSTALLED.isdisjoint(origin.parts) or origin.is_relative_to(sysconfig.get_paths()["stdlib"]):
                break
            files.append(origin)
        locations: Any = spec.submodule_search_locations or []
        # A namespace package looks its parents up among the modules that are loaded.
        places = list(getattr(locations, "_path", locations))
        if not places:
            break
    return files
