"""Measure the families and write the table: python -m tests.bridge.families.table [FAMILY ...]

Writes experiments/results/families/table.json and docs/models.md. Families and columns that are not asked for keep what
was measured before. ``--failures FILE`` writes the cells that are wrong.
"""

import argparse
import contextlib
import datetime
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_bridge.common.files import write_json
from tests.bridge.families import page
from tests.bridge.families.cells import WRONG, Cell
from tests.bridge.families.ranks import AXES, measured_by_ranks
from tests.bridge.families.zoo import FAMILIES, reason


def main() -> None:
    """Measure what is asked for, and write it."""
    # Not at the top: the processes of a pool import this module.
    from tests.bridge.families.columns import COLUMNS
    from tests.bridge.families.measure import measured

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--columns", help=f"names with commas between, of {', '.join((*COLUMNS, *AXES))}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--failures", type=Path, help="a file for the cells that are wrong")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page again")
    options = parser.parse_args()
    columns = (*COLUMNS, *AXES) if options.columns is None else tuple(options.columns.split(","))
    families = [] if options.page else [name for name in options.families or FAMILIES if reason(name) is None]
    began = time.monotonic()

    def tell(name: str, row: dict[str, Cell]) -> None:
        shown = "  ".join(f"{column}: {cell.verdict}" for column, cell in row.items())
        print(f"{time.monotonic() - began:6.1f} s  {name:24s} {shown}", flush=True)
        written = record(name, row)
        if options.failures is not None:
            wrong = failures(written)
            options.failures.write_text("\n".join([f"{len(wrong)} wrong cells", *wrong]) + "\n", "utf-8")

    if options.page:
        record()
        return
    if alone := [column for column in columns if column in COLUMNS]:
        measured(families, alone, options.processes, tell)
    if ranks := [column for column in columns if column in AXES]:
        measured_by_ranks(families, ranks, tell)
    print("\n".join(failures(record())))


def record(name: str | None = None, row: dict[str, Cell] | None = None) -> dict[str, Any]:
    """The results with this row in them, written with their page."""
    found = page.results()
    if name is not None:
        found["date"] = datetime.date.today().isoformat()
        found["versions"] = {package: version(package) for package in ("torch", "transformers", "peft")}
    cells: dict[str, Any] = found.setdefault("families", {})
    if name is not None and row is not None:
        known = {column: [cell.verdict, cell.why] for column, cell in row.items()}
        cells[name] = cells.get(name, {}) | known
    found["families"] = {kind: cells[kind] for kind in FAMILIES if kind in cells and reason(kind) is None}
    found["not made"] = {kind: reason(kind) for kind in FAMILIES if reason(kind) is not None}
    page.RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write_json(page.RESULTS, found)
    with contextlib.suppress(KeyError):  # a part of the columns, so far
        page.PAGE.write_text(page.markdown(found), "utf-8")
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """Lines of the cells that are wrong, by column."""
    return sorted(
        f"{column:10s} {name:24s} {cell[1]}"
        for name, cells in found["families"].items()
        for column, cell in cells.items()
        if cell[0] == WRONG
    )


if __name__ == "__main__":
    main()
