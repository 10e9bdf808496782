"""Results of shares put together in the order of the caller's rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_bridge.engines.mesh import Mesh
from rl_bridge.engines.results import Join, join
from rl_bridge.engines.splitting import Split, joined_columns, take


def in_order(results: Sequence[Any], how: Join | None, parts: Split, layout: Mesh, what: str) -> Any:
    """One result of the workers' results, rows in the order of the rows that were split.

    ``results`` are those of one rank of each share of rows, or of tokens where the columns were cut.

    Raises:
        ValueError: results that do not join as declared, or whose rows are not one for each row of the share.
    """
    nothing = all(result is None for result in results)
    if parts.over_sequence and how in ("rows", None) and not nothing:
        starts = range(0, len(results), layout.sequence)
        results = [_columns(results[start : start + layout.sequence], what) for start in starts]
    joined = join(results, how, what)
    if how != "rows" or parts.shares is None:
        return joined
    order = np.concatenate(parts.shares)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return _arranged(joined, place, what)


def _columns(results: Sequence[Any], what: str) -> Any:
    if not all(isinstance(result, torch.Tensor) and result.dim() > 1 for result in results):
        raise ValueError(f"{what} was split over the sequence: its rows are tensors of at least two axes")
    return joined_columns(results)


def _arranged(joined: Any, place: np.ndarray, what: str) -> Any:
    if isinstance(joined, dict):
        return {key: _arranged(value, place, what) for key, value in joined.items()}
    if isinstance(joined, tuple) and not hasattr(joined, "_fields"):
        return tuple(_arranged(value, place, what) for value in joined)
    if isinstance(joined, tuple):
        fields: Any = (None if value is None else _arranged(value, place, what) for value in joined)
        return type(joined)(*fields)
    if len(joined) != len(place):
        raise ValueError(f"{what} is declared rows: {len(place)} rows went in and {len(joined)} came out")
    return take(joined, place)
