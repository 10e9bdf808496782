"""Options under a library's own names: defaults filled in, unknown names and values refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from rl_fn._numerics import require


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names joined by dots: {"actor": {"clip": 1}} is {"actor.clip": 1}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        flat.update(flattened(value, f"{full}.") if isinstance(value, Mapping) else {full: value})
    return flat


def read(library: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's defaults with the given options in their place; ValueError for an unknown one."""
    given = flattened(config)
    unknown = sorted(set(given) - set(defaults))
    require(not unknown, f"{library}: no such option {', '.join(unknown)}; the known ones: {', '.join(defaults)}")
    return {**defaults, **given}


def one_of(library: str, name: str, value: Any, known: Iterable[Any]) -> Any:
    """Return the value if it is a known one; else ValueError with the known ones."""
    names = list(known)
    require(value in names, f"{library}: {name} must be one of {names}, got {value!r}")
    return value
