"""Argument types, constants and options with which each Triton and Gluon kernel is compiled ahead of time.

One file an operation, each with ``SPECIFICATIONS``: the kernel's name in the table to (function, types by argument,
constants, options of ``Kernel`` in kernels/benchmarks/ahead_of_time.py). Tests, benchmarks and tuning share them.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def specifications() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(name, function, types, constants, options) of every kernel, file by file."""
    for file in sorted(module.name for module in iter_modules(__path__)):
        for name, specification in import_module(f"{__name__}.{file}").SPECIFICATIONS.items():
            yield f"{file}: {name}", *specification
