"""Order of a sequence cut over ranks, so that causal attention is as much work on each."""

import numpy as np

from rl_fn._numerics import require


def zigzag_split(x: np.ndarray, ranks: int, *, axis: int = -1) -> np.ndarray:
    """Shard a sequence so that causal attention costs every rank the same.

    The sequence is cut into 2R chunks; rank r gets chunks r and 2R − 1 − r: one early and cheap, one late and dear.

    Args:
        x: the sequence, of any shape.
        ranks: R ≥ 1.
        axis: the token axis of x, T long.

    Returns:
        `R ...`: ranks first, then x's axes with T / R on the token axis.

    Raises:
        ValueError: unless 2R divides T.

    Reference:
        Brandon et al. (Striped Attention), arXiv 2311.09431, for the imbalance of contiguous shards; the zigzag order
        is Llama 3's context parallelism, arXiv 2407.21783, section 3.3.2.

    >>> import numpy as np
    >>> zigzag_split(np.arange(8), 2).tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]

    """
    require(ranks >= 1, f"ranks must be at least 1, got {ranks}")
    tokens = x.shape[axis]
    require(tokens % (2 * ranks) == 0, f"zigzag needs 2 · {ranks} ranks to divide the tokens, got {tokens}")
    chunks = np.stack(np.split(x, 2 * ranks, axis=axis))
    return np.concatenate([chunks[:ranks], chunks[ranks:][::-1]], axis=axis + 1 if axis >= 0 else axis)


def zigzag_gather(shards: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Put the shards of zigzag_split together again.

    Args:
        shards: `R ...`: ranks first, as zigzag_split returns them.
        axis: the token axis of the sequence, without the axis of ranks.

    Returns:
        The sequence, R times as long on its token axis.

    Raises:
        ValueError: if a shard's token axis is not even.

    Reference:
        Llama 3, arXiv 2407.21783, section 3.3.2.

    >>> import numpy as np
    >>> zigzag_gather(zigzag_split(np.arange(8), 2)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]

    """
    inner = axis + 1 if axis >= 0 else axis
    require(shards.shape[inner] % 2 == 0, f"a shard is two chunks, got {shards.shape[inner]} tokens")
    early, late = np.split(shards, 2, axis=inner)
    return np.concatenate([*early, *late[::-1]], axis=axis)
