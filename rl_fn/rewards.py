"""Around the group's advantages: which groups are worth training on, and a penalty for answers that grow too long."""

import math

import jax.numpy as jnp
from jaxtyping import Float, Real

from rl_fn._groups import Groups, valid_of, within
from rl_fn._numerics import ANY, Array, Number, as_float, known, numbers, require, same_shape
from rl_fn.advantages.group import Rewards, Valid


def group_filter(
    rewards: Rewards,
    valid: Valid | None = None,
    *,
    low: Number = -math.inf,
    high: Number = math.inf,
    group_ids: Groups | None = None,
) -> Valid:
    """DAPO's dynamic sampling as a mask: keep the groups that carry a gradient.

    keep where not all rewards of the group are equal, and low < mean of the group < high

    Without bounds any two different rewards will do: 0 and 1, DAPO's −1 and 1, or those of a reward model. The bounds,
    in units of the reward, drop groups that are nearly solved or nearly hopeless as well.

    Args:
        rewards: `*batch G`, one group along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        low: the group's mean reward must exceed it; no bound by default.
        high: the group's mean reward must stay below it; no bound by default.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, the same for all answers of a group; False where invalid.

    Raises:
        ValueError: unless low < high.

    Reference:
        Yu et al. (DAPO), arXiv 2503.14476 (dynamic sampling).

    >>> import jax.numpy as jnp
    >>> group_filter(jnp.array([[1.0, -1.0], [1.0, 1.0]])).tolist()
    [[True, True], [False, False]]

    """
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    low, high = numbers(r.dtype, ANY, low=low, high=high)
    require(low < high, f"need low < high, got low={low}, high={high}")
    exists = valid_of(r, valid)
    group = within(r, exists, group_ids)
    return exists & (group.mean > low) & (group.mean < high) & (group.variance > 0)


def overlong_penalty(lengths: Real[Array, "*batch"], *, max_length: Number, buffer: Number) -> Float[Array, "*batch"]:
    """DAPO's soft overlong punishment, to be added to the reward.

    0 up to L − b;  (L − b − l)/b up to L;  −1 beyond;  L = max_length, b = buffer

    Args:
        lengths: l, tokens of each answer, `*batch`.
        max_length: L.
        buffer: b, from 0 to L: the length over which the penalty grows; with 0 it is a step beyond L.

    Returns:
        `*batch`, in [−1, 0].

    Raises:
        ValueError: if buffer is not between 0 and max_length.

    Reference:
        Yu et al. (DAPO), arXiv 2503.14476 (overlong reward shaping; there L = 20480, b = 4096).

    >>> import jax.numpy as jnp
    >>> overlong_penalty(jnp.array([60, 90, 101]), max_length=100, buffer=20).tolist()
    [0.0, -0.5, -1.0]

    """
    (length,) = as_float(lengths)
    max_length, buffer = numbers(length.dtype, ANY, max_length=max_length, buffer=buffer)
    refused = f"buffer must be between 0 and {max_length}, got {buffer}"
    require(buffer >= 0, refused)
    require(buffer <= max_length, refused)
    if known(buffer) and buffer == 0:
        return jnp.where(length > max_length, -1.0, jnp.zeros_like(length))
    over = jnp.maximum(length - (max_length - buffer), 0.0)
    if known(buffer):
        return jnp.where(over <= 0, 0.0, -jnp.minimum(over / buffer, 1.0))
    # A traced buffer may be 0: one token too many then costs everything.
    part = jnp.where(buffer == 0, 1.0, over / jnp.where(buffer == 0, 1.0, buffer))
    return jnp.where(over <= 0, 0.0, -jnp.minimum(part, 1.0))
