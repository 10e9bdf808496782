"""Which backend of an operation runs. An explicit request is honoured or refused, never replaced."""

from collections.abc import Callable, Sequence
from importlib import import_module


def resolve(operation: str, available: Sequence[str], backend: str | None) -> Callable:
    """The ``run`` function of a backend: the first of ``available`` unless one is asked for by name."""
    name = available[0] if backend is None else backend
    if name not in available:
        raise NotImplementedError(f"{operation} has no backend {name!r}; available: {', '.join(available)}")
    return import_module(f"rl_kernels.{operation}.{name}").run
