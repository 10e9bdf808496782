"""The columns that two ranks compute: one pair of processes walks over all families.

What one rank alone raises, or a rank that hangs, ends the pair; another goes on behind that cell.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.bridge.families.cells import WRONG, Cell
from tests.support.ranks import forking

AXES = {"shard": (1, 2, 1, 1), "sequence": (1, 1, 2, 1), "tensor": (1, 1, 1, 2)}
"""Columns, and the sizes of their meshes: replicate, shard, sequence, tensor."""
SECONDS = 60.0
"""That a cell may take, on a machine that does other things too."""

Place = tuple[str, str]
"""A family and a column."""


def measured_by_ranks(
    families: Sequence[str], columns: Sequence[str] = tuple(AXES), tell: Callable[..., Any] = lambda *_: None
) -> dict[str, dict[str, Cell]]:
    """The cells of each family by column; each row is told as it is there."""
    places = [(family, column) for family in families for column in columns]
    found: dict[Place, Cell] = {}
    told: dict[str, dict[str, Cell]] = {}
    while left := [place for place in places if place not in found]:
        with tempfile.TemporaryDirectory() as folder:
            for cells in _walk(left, Path(folder)):
                found |= cells
                for family in families:
                    if family not in told and all((family, column) in found for column in columns):
                        told[family] = {column: found[family, column] for column in columns}
                        tell(family, told[family])
    return told


def _walk(places: Sequence[Place], folder: Path) -> Iterator[dict[Place, Cell]]:
    """The cells of the first places up to the one that a pair of processes does not survive, as they come."""
    context = forking()
    pair: list[BaseProcess] = [context.Process(target=_rank, args=(n, places, str(folder))) for n in range(2)]
    for process in pair:
        process.start()
    seen, since = 0, time.monotonic()
    while any(process.is_alive() for process in pair):
        lines = _lines(folder, 0), _lines(folder, 1)
        if sum(map(len, lines)) != seen:
            seen, since = sum(map(len, lines)), time.monotonic()
            yield _joined(places[: min(map(len, lines))], *lines)
        one_died = any(process.exitcode for process in pair)
        if time.monotonic() - since > (5.0 if one_died else SECONDS + 10.0 * (seen == 0)):
            break
        time.sleep(0.2)
    for process in pair:
        process.kill()
        process.join()
    yield _joined(places, _lines(folder, 0), _lines(folder, 1))


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / f"rank{rank}.jsonl"
    if not file.exists():
        return []
    whole = file.read_text("utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _joined(places: Sequence[Place], first: list[dict], second: list[dict]) -> dict[Place, Cell]:
    """Cells that both ranks told; of the next one what either said, or that both were silent."""
    found: dict[Place, Cell] = {}
    for number, place in enumerate(places):
        cells = [Cell(**lines[number]) for lines in (first, second) if len(lines) > number]
        if len(cells) == 2:
            wrong = [cell for cell in cells if cell.verdict == WRONG]
            found[place] = max(wrong or cells, key=lambda cell: cell.error or 0.0)
            if cells[0].verdict != cells[1].verdict and not wrong:
                found[place] = Cell(WRONG, f"the ranks disagree: {cells[0].text()}; {cells[1].text()}")
            continue
        said = cells[0].text() if cells else "no rank came to an end"
        found[place] = Cell(WRONG, f"one rank came to no end; the other: {said}" if cells else said)
        break
    return found


def _rank(number: int, places: Sequence[Place], folder: str) -> None:
    """One of the two processes."""
    import warnings

    import torch
    import torch.distributed as dist
    from transformers.utils import logging

    from rl_bridge.executors.host import Host
    from tests.bridge.families.two_ranks import OneRank

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=SECONDS))
    rank = OneRank(Host(number, group_timeout=SECONDS), number)
    with Path(folder, f"rank{number}.jsonl").open("w", encoding="utf-8") as file:
        for place, (family, column) in enumerate(places):
            cell = rank.cell(family, column)
            file.write(json.dumps(cell._asdict()) + "\n")
            file.flush()
            # Where one of the two raised alone, the other waits in a collective: this wait then ends both.
            store.set(f"{place}/{number}", cell.verdict)
            store.wait([f"{place}/{1 - number}"], timedelta(seconds=SECONDS))
