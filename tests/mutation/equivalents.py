"""Mutants that change nothing that can be observed, each with its argument from the code: equivalents/*.toml."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.mutation.mutants import Mutant

FOLDER = Path(__file__).with_name("equivalents")
FIELDS = ("file", "owner", "kind", "text", "before", "after")

Name = tuple[str, ...]


def read(package: str, folder: Path = FOLDER) -> dict[Name, str]:
    """The reason of each, by name; an edit of the source line makes an entry stale, so that it is argued anew."""
    path, found = folder / f"{package}.toml", {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["equivalent"]:
        name = (*(entry[field] for field in FIELDS), str(entry.get("nth", 0)))
        if name in found:
            raise ValueError(f"{path.name} has {name} twice")
        if not entry["reason"].strip():
            raise ValueError(f"{path.name} has no reason for {name}")
        found[name] = entry["reason"]
    return found


def stale(reasons: Iterable[Name], mutants: Iterable[Mutant]) -> list[Name]:
    """Entries whose mutant there is no more."""
    names = {mutant.name for mutant in mutants}
    return [name for name in reasons if name not in names]


def joined(pairs: Iterable[tuple[Mutant, str]], reasons: dict[Name, str]) -> list[tuple[Mutant, str]]:
    """The status of an explained survivor is "equivalent"."""
    return [(m, "equivalent" if s == "survived" and m.name in reasons else s) for m, s in pairs]
