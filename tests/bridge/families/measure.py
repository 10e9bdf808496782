"""The whole table, measured: every family in processes of this machine."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from tests.bridge.families.cells import Cell

Row = dict[str, Cell]
"""A family's cells by column."""


def cells_of(model_type: str, columns: Sequence[str]) -> Row:
    """The cells of one family that one process computes."""
    import torch
    from transformers.utils import logging

    from tests.bridge.families.columns import Family

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Family(model_type).cells(tuple(columns))


def measured(
    families: Sequence[str], columns: Sequence[str], processes: int, tell: Callable[[str, Row], Any]
) -> dict[str, Row]:
    """The rows of ``families``, each told as it is there."""
    found: dict[str, Row] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        rows: Iterable[Row] = pool.map(partial(cells_of, columns=tuple(columns)), families)
        for name, row in zip(families, rows, strict=True):
            found[name] = row
            tell(name, row)
    return found
