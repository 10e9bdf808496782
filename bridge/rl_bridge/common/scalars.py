"""Numbers that a user's code computes with any library, as Python has them."""

from typing import Any

FLOAT32 = 3.4028234663852886e38
"""The largest number of float32, in which a run computes and which rewards become: a larger one would be infinite."""


def plain_scalar(value: Any) -> Any:
    """The number of a scalar of numpy, torch or jax; any other value as it is.

    >>> import numpy as np
    >>> plain_scalar(np.float32(0.5)), plain_scalar(np.array(3)), plain_scalar("3"), plain_scalar([3])
    (0.5, 3, '3', [3])
    """
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
