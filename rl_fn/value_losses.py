"""Losses for the critic, per token."""

import jax.numpy as jnp

from rl_fn._numerics import POSITIVE, Mask, Number, Tokens, as_float, keep, numbers, same_shape


def value_loss(values: Tokens, returns: Tokens, mask: Mask | None = None) -> Tokens:
    """Squared error of the critic, without a half.

    (V − R)²

    Args:
        values: V, `*batch T`.
        returns: R, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Schulman et al. (PPO), arXiv 1707.06347, equation 9.

    >>> import jax.numpy as jnp
    >>> value_loss(jnp.array([1.0]), jnp.array([3.0])).tolist()
    [4.0]

    """
    same_shape(values=values, returns=returns, mask=mask)
    v, r = as_float(values, returns)
    return jnp.square(keep(v, mask) - keep(r, mask))


def value_clip(
    values: Tokens, old_values: Tokens, returns: Tokens, mask: Mask | None = None, *, clip: Number = 0.5
) -> Tokens:
    """Clipped squared error of the critic, without a half: the worse of V and of V held near its old value.

    max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

    Args:
        values: V, `*batch T`.
        old_values: V_old, the critic when the rollout was scored, `*batch T`.
        returns: R, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip: ε > 0, in units of value.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if clip is not positive.

    Reference:
        Engstrom et al., arXiv 2005.12729 (PPO's code-level value clipping).

    >>> import jax.numpy as jnp
    >>> value_clip(jnp.array([2.0]), jnp.array([0.0]), jnp.array([2.0])).tolist()
    [2.25]

    """
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    v, old, r = as_float(values, old_values, returns)
    (clip,) = numbers(v.dtype, POSITIVE, clip=clip)
    v, old, r = keep(v, mask), keep(old, mask), keep(r, mask)
    free = jnp.square(v - r)
    held = jnp.square(jnp.clip(v, old - clip, old + clip) - r)
    # Inside the interval the two are equal, and so are their gradients: a tie's halves add up to the whole.
    return jnp.maximum(free, held)


def value_huber(values: Tokens, returns: Tokens, mask: Mask | None = None, *, delta: Number = 1.0) -> Tokens:
    """Huber loss of the critic: quadratic near the return, linear far from it.

    ½e² if |e| ≤ δ, else δ(|e| − ½δ);  e = V − R

    Args:
        values: V, `*batch T`.
        returns: R, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        delta: δ > 0, where the loss becomes linear.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if delta is not positive.

    Reference:
        Huber, Robust Estimation of a Location Parameter (1964).

    >>> import jax.numpy as jnp
    >>> value_huber(jnp.array([0.5, 3.0]), jnp.zeros(2)).tolist()
    [0.125, 2.5]

    """
    same_shape(values=values, returns=returns, mask=mask)
    v, r = as_float(values, returns)
    (delta,) = numbers(v.dtype, POSITIVE, delta=delta)
    error = keep(v, mask) - keep(r, mask)
    near = jnp.clip(error, -delta, delta)
    # Not |e|: the curvature of ½|e|² would come out as 0 at e = 0.
    return 0.5 * jnp.square(near) + near * (error - near)
