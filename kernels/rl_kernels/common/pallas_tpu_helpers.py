"""What the Pallas kernels for TPU share: a core runs the tiles of a row one after the other, and keeps the
row's state in its memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rl_kernels.common.pallas_helpers import NOTHING, Options, empty_state, merge_row_states, target_of, tile_state


def absorb(
    x: jax.Array,
    possible: jax.Array,
    column: jax.Array,
    tokens: Sequence[jax.Array],
    tile: Any,
    refs: tuple[Any, ...],
) -> None:
    """Merge a tile into the row states: refs (maximum, sum_exp, weighted) [R, 1] and target [R, K]."""
    *state, target = refs

    @pl.when(tile == 0)
    def _() -> None:
        for ref, value in zip(state, empty_state(x.shape[0]), strict=True):
            ref[...] = value
        target[...] = jnp.full(target.shape, NOTHING, jnp.float32)

    maximum, total, weighted = (ref[...] for ref in state)
    for ref, value in zip(state, merge_row_states((maximum, total, weighted), tile_state(x, possible)), strict=True):
        ref[...] = value
    for k, token in enumerate(tokens):
        found = target_of(x, possible, column, token)
        target[:, k : k + 1] = jnp.maximum(target[:, k : k + 1], found)


def rows_spec(width: int, options: Options, *, rows_axis: int = 0) -> pl.BlockSpec:
    """Block of a [N, width] array that follows the rows' grid axis."""
    return pl.BlockSpec((options.block_tokens, width), lambda *grid: (grid[rows_axis], 0))


def grid_parameters(interpret: bool) -> dict[str, Any]:
    """Keyword arguments of pallas_call: rows may run in any order, vocabulary tiles of a row may not."""
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    return {"interpret": True} if interpret else {"compiler_params": parallel}
