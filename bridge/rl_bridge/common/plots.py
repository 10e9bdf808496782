"""Figures of files, never of windows; and a figure that cannot be drawn is said, and costs no run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rl_bridge.common.terminal import tell

_BACKEND = os.environ.pop("MPLBACKEND", None)
# matplotlib cannot be imported where the variable names no backend. A Figure needs none.
try:
    import matplotlib
    from matplotlib import colormaps
    from matplotlib.figure import Figure
finally:
    if _BACKEND is not None:
        os.environ["MPLBACKEND"] = _BACKEND
if _BACKEND:
    try:
        matplotlib.rcParams["backend"] = _BACKEND  # for a function of the user's that opens windows
    except ValueError as error:
        tell(f"MPLBACKEND is left aside: {str(error).partition(';')[0]}")

__all__ = ["Figure", "colormaps", "spared"]


@contextmanager
def spared(what: str) -> Iterator[None]:
    """An error while ``what`` is drawn ends here, as a line for the user."""
    try:
        yield
    except Exception as error:
        tell(f"{what} is not drawn: {type(error).__name__}: {error}")
