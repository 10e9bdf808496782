"""What the oracles share: they are written from the papers in float64 NumPy with plain loops.

They share no code with rl_fn. A function of a family has the name, the arguments and the meaning of its namesake; named
tuples come as plain tuples in the same order.
"""

import numpy as np


def f64(x):
    return np.asarray(x, dtype=np.float64)


def rows(mask, segment_ids=None):
    """Yield (row index, positions of the counted tokens) for every sequence, packed or not; empty ones too."""
    for row in np.ndindex(mask.shape[:-1]):
        ids = np.zeros(mask.shape[-1], int) if segment_ids is None else segment_ids[row]
        for segment in dict.fromkeys(ids.tolist()):
            yield row, [t for t in range(mask.shape[-1]) if ids[t] == segment and mask[row][t]]


def at_row(value, row):
    value = f64(value)
    return value[row] if value.ndim else float(value)
