"""The oracle of a public function, whichever family it is in."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODULES = [
    importlib.import_module(f"tests.oracle.{file.stem}")
    for file in sorted(Path(__file__).parent.glob("*.py"))
    if file.stem not in ("lookup", "base", "surrogates")
]
ORACLE: dict[str, Callable[..., Any]] = {
    name: function
    for module in _MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}
