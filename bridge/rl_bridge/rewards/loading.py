"""A reward function from the user's file."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_folders: set[Path] = set()
"""Folders that reward files were loaded from in this process."""


def load_reward(source: str) -> Callable[..., Any]:
    """The function that ``FILE.py:function`` names. The file can import the modules that lie beside it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the source is not of that form, the file fails to load, or has no such function.
    """
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", source)
    if match is None:
        raise ValueError(f"a reward is named FILE.py:function, got {source!r}")
    path = Path(match[1])
    if not path.is_file():
        raise FileNotFoundError(f"no such reward file: {path}")
    spec = importlib.util.spec_from_file_location(f"rl_bridge_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, among others, look their own module up.
    sys.modules[spec.name] = module
    try:
        with _neighbours(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, match[2], None)
    if not callable(function):
        raise ValueError(f"{path} has no function {match[2]!r}")
    return function


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Modules in the folder can be imported: first of all while the file is loaded, afterwards last of all."""
    # A neighbour of another reward's file may have the same name.
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        here = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        if here and origin and not {*Path(origin).parents[:2]}.isdisjoint(_folders - {folder}):
            del sys.modules[name]
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
        sys.path.append(str(folder))  # for what the function imports when it is called
