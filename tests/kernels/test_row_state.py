"""The algebra behind every operation: merging is associative, tiles and shards change nothing, NaN never appears."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_kernels.common.row_state import RowState, finalize_row_state, merge_all, merge_row_states, tile_state
from tests.kernels.exact import exact

INF = float("inf")
values = st.one_of(st.floats(-90, 90), st.just(-INF))


def rows(width):
    return st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=4)


@st.composite
def tiled(draw):
    width = draw(st.integers(1, 12))
    x = torch.tensor(draw(rows(width)), dtype=torch.float64)
    tokens = torch.tensor(draw(st.lists(st.integers(0, width - 1), min_size=2 * len(x), max_size=2 * len(x))))
    cuts = sorted(draw(st.lists(st.integers(0, width), max_size=4)))
    return x, tokens.view(len(x), 2), [0, *cuts, width]


def states(x, tokens, cuts):
    return [tile_state(x[:, a:b], tokens - a) for a, b in itertools.pairwise(cuts)]


@given(tiled())
def test_any_cut_of_a_row_gives_its_log_probabilities(case):
    x, tokens, cuts = case
    for got, wanted in zip(finalize_row_state(merge_all(states(x, tokens, cuts))), exact(x, tokens), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@given(tiled())
def test_merge_is_associative_and_has_a_neutral_element(case):
    x, tokens, cuts = case
    parts = states(x, tokens, cuts)
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = merge_row_states(part, right)
    left = merge_all(parts)
    empty = tile_state(x[:, :0], tokens)
    for other in (right, merge_row_states(left, empty), merge_row_states(empty, left)):
        for a, b in zip(left, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_row_without_entries_is_defined():
    x = torch.full((2, 3), -INF)
    logprobs, entropy, logsumexp = finalize_row_state(tile_state(x, torch.zeros(2, 1, dtype=torch.long)))
    assert logprobs.tolist() == [[-INF], [-INF]] and entropy.tolist() == [0, 0] and logsumexp.tolist() == [-INF, -INF]


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_entropy_does_not_cancel_under_a_large_offset(offset):
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) + offset
    entropy = finalize_row_state(tile_state(x, torch.zeros(8, 1, dtype=torch.long)))[1]
    torch.testing.assert_close(entropy.double(), exact(x, torch.zeros(8, dtype=torch.long))[1], rtol=2e-6, atol=0)


def test_fields_are_those_of_rl_fn():
    import jax.numpy as jnp

    import rl_fn

    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    state = tile_state(x, torch.tensor([[0], [6], [9]]))
    wanted = rl_fn.row_state(jnp.asarray(x.numpy()), jnp.array([0, 6, 9]))
    for name in RowState._fields:
        got = getattr(state, name)[..., 0] if name == "target" else getattr(state, name)
        torch.testing.assert_close(got, torch.tensor(getattr(wanted, name).tolist()), rtol=1e-6, atol=1e-6)
