"""The comparison as rows, as a table on the screen, and as an exit status."""

import importlib
import os
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rl_bridge.check.case import Row, compare
from rl_bridge.check.loading import DISTRIBUTIONS, Absent, version
from rl_bridge.terminal import say

LIBRARIES = tuple(DISTRIBUTIONS)
MODULES = {
    "trl": ("trl_losses", "trl_pairs"),
    "verl": ("verl_cases",),
    "openrlhf": ("openrlhf_cases",),
    "tunix": ("tunix_cases",),
}
USAGE = f"""usage: rl-fn check {{{",".join(LIBRARIES)}}}

The value and the gradient of rl_fn's dialect of an installed library beside those of the library's own functions, on
random batches: a table, and status 1 if any differ beyond rounding, 2 if the library is not installed."""


def rows(library: str, seeds: int = 3) -> list[Row]:
    """Run every comparison with an installed library; Absent without it."""
    version(library)
    # Other libraries set up their logging and accelerators at import; none of it is needed to compute a loss on a CPU.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [importlib.import_module(f"rl_bridge.check.{name}") for name in MODULES[library]]
        return [compare(library, case, seeds) for module in found for case in module.cases()]


def number(x: float | None) -> str:
    """Two digits, or a dash for what does not exist."""
    return "–" if x is None else f"{x:.1e}"


def table(library: str, found: Sequence[Row]) -> Table:
    """Largest absolute differences of value and gradient, and what rl_fn's own recipe would differ by."""
    out = Table(title=f"rl_fn.dialects.{library} against {DISTRIBUTIONS[library]} {version(library)}")
    out.add_column("what", overflow="fold")
    for name in ("value", "gradient", "rl_fn without the dialect"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("")
    for row in found:
        mark = "ok" if row.agrees else "[bold red]differs[/]"
        out.add_row(row.name, number(row.value), number(row.gradient), number(row.default), mark)
    return out


def check(arguments: Sequence[str]) -> int:
    """`rl-fn check LIBRARY`: 0 if all agree, 1 if something differs beyond tolerance, 2 without the library."""
    if len(arguments) != 1 or arguments[0] not in LIBRARIES:
        print(USAGE)
        if {"--help", "-h"} & set(arguments):
            return 0
        given = " ".join(arguments) or "none"
        say(f"rl-fn: error: rl-fn check takes one library of {', '.join(LIBRARIES)}, got {given}", error=True)
        return 2
    (library,) = arguments
    console = Console()
    try:
        found = rows(library)
    except Absent as absent:
        console.print(f"rl-fn check: {absent}", style="red", highlight=False)
        return 2
    console.print(table(library, found))
    wrong = [row.name for row in found if not row.agrees]
    console.print(f"{len(found) - len(wrong)} of {len(found)} agree")
    return 1 if wrong else 0
