"""A Python file of the user's as a module: a reward's, an environment's."""

import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rl_bridge.common.terminal import remark

_BEGIN_PROCESSES = ("reward", "environment")
_kinds: dict[str, str] = {}
"""Name of a module that a file was loaded as in this process → its kind. A file may hold a reward and a tool."""
_folders: set[Path] = set()
"""Folders that files were loaded from in this process."""


class _OfText(importlib.machinery.SourceFileLoader):
    """Compiles the file's text: Python knows its own copy by seconds and size, which an edit may leave as they are."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_file(path: Path, kind: str) -> ModuleType:
    """The file as a module. The file can import the modules that lie beside it. ``kind`` is what it holds: "reward".

    Each call runs the file anew: tasks and clients of a module may belong to an event loop that ends with the caller.

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
    spec = importlib.util.spec_from_file_location(name, path, loader=_OfText(name, str(path.absolute())))
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


@functools.lru_cache(maxsize=256)
def callable_in(path: str, name: str, kind: str, form: str) -> Any:
    """The object ``name`` of the file, which is run once for each name. ``form``: what it is to be, as "function {!r}".

    Raises:
        ValueError: there is none that can be called; besides what ``load_file`` raises.
    """
    value = getattr(load_file(Path(path), kind), name, None)
    if not callable(value):
        actual = "" if value is None else f": {name} is of the type {type(value).__name__}"
        raise ValueError(f"{path} has no {form.format(name)}{actual}")
    return value


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

    ``os._exit`` raises SystemExit instead, whatever the status. Whether torch records gradients in this thread is
    afterwards as it was; so are the working directory and torch's default dtype, where the function has changed them:
    what the program itself or a function of another thread sets meanwhile stays.
    """
    torch = _torch()
    gradients = torch is None or torch.is_grad_enabled()
    outer = _owner.get()
    with _at_work.lock:
        for setting in _at_work.settings:
            setting.begin(is_first=not _at_work.owners)
        own = None if outer in _at_work.owners else object()
        if own is not None:
            _at_work.owners.add(own)
            _owner.set(own)
    try:
        with only_the_users_code():
            yield
    finally:
        if torch is not None:
            torch.set_grad_enabled(gradients)
        if own is not None:
            _owner.set(outer)
        with _at_work.lock:
            _at_work.owners.discard(own)
            for setting in _at_work.settings:
                setting.end(own, is_last=not _at_work.owners)


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


def told(error: BaseException) -> str:
    """An error in words; one without words of its own, as of a bare ``assert``, by the line that raised it.

    >>> told(ValueError("no such row")), told(KeyError())
    ('ValueError: no such row', 'KeyError')
    """
    kind, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    if str(error) or not frames:
        return f"{kind}: {error}" if str(error) else kind
    return f"{kind} at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}"


def _leave(status: int) -> None:
    """``os._exit``, but where a function of the user's calls it: a run would end with status 0 and without a word."""
    # A child that the function has forked ends as it wants to.
    if os.getpid() == _here and getattr(_inside, "calls", 0):
        raise SystemExit(f"os._exit({status})")
    _exit(status)


def this_process_is_the_users() -> None:
    """From here on ``os._exit`` ends this process, which is one object's alone: whoever waits for it sees its end."""
    global _here
    _here = -1


# The working directory and torch's default dtype, which a process has once for all threads.


class _Setting:
    """A setting of the whole process that functions of the user's may change; afterwards it is the program's own."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._read, self._write = read, write
        self._own: Any = None
        """The program's; None where there is none, as without torch."""
        self._mover: object = None
        """Who set it last: the owner of a function at work, ``_ANYONE``, or None for the program."""

    def begin(self, *, is_first: bool) -> None:
        """A function begins, the first of those at work or beside others."""
        if is_first or self._own is None:
            self._own, self._mover = self._read(), None

    def moved(self, *, may_be_program: bool) -> None:
        """This thread has set it: a function that is at work, the program, or a thread of which neither is known."""
        owner = _owner.get()
        if owner in _at_work.owners:
            self._mover = owner
        elif may_be_program and not getattr(_inside, "calls", 0):
            self._own, self._mover = self._read(), None
        else:
            self._mover = _ANYONE

    def end(self, own: object, *, is_last: bool) -> None:
        """A function ends, that of the owner ``own``, or one inside another's, without ``own``.

        Others that are at work stay where they are. What C code has moved shows at the end of the last.
        """
        is_mine = own is not None and self._mover in (own, _ANYONE)
        if self._own is not None and (is_mine or is_last) and self._read() != self._own:
            self._write(self._own)
        if is_mine:
            self._mover = None


def _place() -> str | None:
    """The working directory; None where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _go_back(place: str) -> None:
    try:
        _chdir(place)
    except OSError as error:  # a function's result or its own error counts more
        _remark_once(f"the program cannot go back to its folder {place} behind a function of yours: {error.strerror}")


@functools.lru_cache(maxsize=64)
def _remark_once(text: str) -> None:
    with contextlib.suppress(Exception):  # nobody may read it
        remark(text)


def _moves_place(set_place: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    # Outside of functions the main thread is the program's alone: a function may go on in threads of its own.
    is_main = threading.current_thread() is threading.main_thread()
    with _at_work.lock:
        set_place(*arguments, **keywords)
        _at_work.place.moved(may_be_program=is_main)


def chdir(path: Any) -> None:
    """``os.chdir``, of which ``the_users_code`` knows who called it."""
    _moves_place(_chdir, path)


def fchdir(fd: Any) -> None:
    """``os.fchdir``, of which ``the_users_code`` knows who called it."""
    _moves_place(_fchdir, fd)


def _torch() -> Any:
    """The module, if it has been imported: a reward's own process has none. Its setters are watched from then on."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_grad_enabled"):  # another thread may be importing it
        return None
    with _at_work.lock:
        if not hasattr(torch.set_default_dtype, _WATCHED):
            for name in ("set_default_dtype", "set_default_tensor_type"):
                if hasattr(torch, name):
                    setattr(torch, name, _watched(torch, getattr(torch, name)))
    return torch


def _watched(torch: Any, set_dtype: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_dtype)
    def watched(*arguments: Any, **keywords: Any) -> None:
        with _at_work.lock:
            before = torch.get_default_dtype()
            set_dtype(*arguments, **keywords)
            # A library sets it while it builds a model, and back. Torch's compiler sets what is set already, which may
            # be a function's.
            if torch.get_default_dtype() != before:
                _at_work.dtype.moved(may_be_program=True)

    setattr(watched, _WATCHED, True)
    return watched


def _dtype() -> Any:
    torch = _torch()
    return None if torch is None else torch.get_default_dtype()


def _set_dtype(dtype: Any) -> None:
    sys.modules["torch"].set_default_dtype.__wrapped__(dtype)


class _AtWork:
    """Which functions of the user's are at work, and what was set in the process before the first."""

    def __init__(self) -> None:
        self.forked()
        self.place, self.dtype = _Setting(_place, _go_back), _Setting(_dtype, _set_dtype)
        self.settings = (self.place, self.dtype)

    def forked(self) -> None:
        """In a new process: no other thread's function is here, and nobody has the lock."""
        # A signal's handler may move the program, too.
        self.lock: Any = threading.RLock()
        self.owners: set[object] = set()


def _now_here() -> None:
    """A child that a function has forked ends as it wants to; one that the program has forked is guarded as before."""
    global _here
    _here = -1 if getattr(_inside, "calls", 0) else os.getpid()
    _at_work.forked()


_ANYONE, _WATCHED = object(), "_rl_bridge_watches"
_inside, _at_work = threading.local(), _AtWork()
_owner: ContextVar[object] = ContextVar("owner", default=None)
"""The outermost function of the user's in this thread, or in the thread that a coroutine is awaited in."""
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
    elsewhere = {str(other) for other in _folders - {folder}}
    for name in [each for each in list(sys.modules) if "." not in each and each != "__main__"]:
        if not elsewhere.isdisjoint(_folders_of(sys.modules.get(name))) and _lies_in(folder, name):
            for inner in [each for each in list(sys.modules) if each == name or each.startswith(f"{name}.")]:
                sys.modules.pop(inner, None)
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
        sys.path.append(str(folder))  # for what the file's functions import when they are called


def _lies_in(folder: Path, name: str) -> bool:
    """Whether an import finds a module or a package of this name in the folder: one of rows alone is no package."""
    place = folder / name
    inside = itertools.chain(place.glob("*.py"), place.glob("*/*.py"))
    return os.path.isfile(f"{place}.py") or (os.path.isdir(place) and next(inside, None) is not None)


def _folders_of(module: Any) -> set[str]:
    """The folders that a module or a package may be imported from; one without ``__init__.py`` has places, no file."""
    own = getattr(module, "__dict__", {})  # a module may have a __getattr__ of its own
    file, places = own.get("__file__"), own.get("__path__") or ()
    parents = [os.path.dirname(str(place)) for place in (file, *places) if place is not None]
    return {*parents, *map(os.path.dirname, parents)}


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a call must give."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
