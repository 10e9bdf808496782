"""Sequences into rows, rows over ranks: on the host, NumPy in and out."""

from rl_fn.packing.balance import balance
from rl_fn.packing.pack import pack, position_ids, segment_ids
from rl_fn.packing.zigzag import zigzag_gather, zigzag_split

__all__ = [
    "balance",
    "pack",
    "position_ids",
    "segment_ids",
    "zigzag_gather",
    "zigzag_split",
]
