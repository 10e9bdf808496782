from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.token_batch import TokenBatch, collate, micro_batches, padded_rows, restore, stand_in
from tests.support.trajectories import PAD, TRAJECTORIES, trajectory, unpadded, widened


@given(TRAJECTORIES)
def test_collate_keeps_every_token_and_its_logprob(trajectories):
    batch = collate(trajectories, PAD)
    wanted = [(list(t.tokens), list(t.loss_mask), torch.tensor(t.sampled_logprobs).tolist()) for t in trajectories]
    assert unpadded(batch) == wanted
    assert batch.tokens.shape[1] == int(batch.lengths.max()) and not batch.mask[:, 0].any()
    padding = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
    assert bool((batch.tokens[padding] == PAD).all()) and not batch.mask[padding].any()


def test_a_row_knows_its_group():
    batch = collate([trajectory([2], [3], group=group) for group in (4, 0, 4)], PAD)
    assert batch.groups.tolist() == [4, 0, 4]


def test_no_trajectories():
    with pytest.raises(ValueError, match="cannot make a batch of no trajectories"):
        collate([], PAD)


@given(TRAJECTORIES, st.integers(1, 60))
def test_micro_batches_are_the_batch_in_parts_no_wider_than_needed(trajectories, max_tokens):
    batch = collate(trajectories, PAD)
    parts = micro_batches(batch, max_tokens)
    assert torch.equal(torch.cat([part.places for part in parts]).sort().values, torch.arange(len(trajectories)))
    rows = unpadded(batch)
    for index, part in parts:
        assert unpadded(part) == [rows[i] for i in index.tolist()]
        assert len(part.mask) == 1 or part.tokens.numel() <= max_tokens
        assert part.tokens.shape[1] == int(part.lengths.max())
    assert torch.equal(restore([(i, p.rollout_logprobs) for i, p in parts], batch.tokens), batch.rollout_logprobs)


def test_what_fits_together_stays_together_in_its_order():
    batch = collate([trajectory([2], [3] * n) for n in (3, 1, 2)], PAD)
    [part] = micro_batches(batch, 12)
    assert part.places.tolist() == [0, 1, 2]
    assert all(a is None or torch.equal(a, b) for a, b in zip(part.batch, batch, strict=True))


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 90))
def test_rows_of_similar_length_go_together(lengths, max_tokens):
    parts = padded_rows(lengths, max_tokens)
    chosen = [[lengths[i] for i in part] for part in parts]
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    assert all(max(a) <= min(b) for a, b in pairwise(chosen))
    assert all(len(part) == 1 or len(part) * max(part) <= max_tokens for part in chosen)


@given(TRAJECTORIES, st.integers(0, 4))
def test_trim_undoes_padding(trajectories, columns):
    batch = collate(trajectories, PAD)
    trimmed = widened(batch, columns, 7.0).trim()
    assert unpadded(trimmed) == unpadded(batch) and trimmed.tokens.shape == batch.tokens.shape
    assert trimmed.rows(slice(0, 0)).trim().tokens.shape == (0, 1)


def test_masked_tokens_in_the_middle_are_not_cut_off():
    """A tool's output between two turns is masked for every row of the part, and what follows it is not."""
    batch = collate([trajectory([2], [3, 4, 5])], PAD)
    mask = torch.tensor([[False, True, False, False]])
    part = batch._replace(mask=mask).trim()
    assert part.tokens.tolist() == [[2, 3, 4, 5]] and part.mask.tolist() == mask.tolist()


def test_rows_map_and_devices_reach_every_field_that_is_there():
    batch = collate([trajectory([2], [3, 4]), trajectory([5, 6], [7])], PAD)._replace(advantages=torch.ones(2, 3))
    chosen = batch.rows(torch.tensor([1]))
    assert chosen.tokens.tolist() == [[5, 6, 7]] and chosen.old_logprobs is None
    assert all(len(value) == 1 for value in chosen if value is not None)
    assert all(a is None or torch.equal(a, b) for a, b in zip(batch.to("cpu"), batch, strict=True))
    assert isinstance(batch.map(torch.clone), TokenBatch)


def with_sets(prompt, *sets):
    """A trajectory that recorded these sets, and drew the largest id of each."""
    return trajectory(prompt, [max(s) for s in sets], allowed_tokens=(*[()] * len(prompt), *sets))


SETS = [with_sets([2, 3], (4, 5, 6), array("i", [7])), with_sets([2], (1, 8)), trajectory([2, 3, 4], [])]


def test_collate_lays_the_allowed_tokens_beside_the_tokens_drawn_from_them():
    allowed = collate(SETS, PAD).allowed_tokens
    none = [-1, -1, -1]
    wanted = [[none, none, [4, 5, 6], [7, -1, -1]], [none, [1, 8, -1], none, none], [none] * 4]
    assert allowed.dtype == torch.int64 and allowed.tolist() == wanted


def test_nobody_recorded_allowed_tokens():
    batch = collate([trajectory([2], [3]), trajectory([2], [3, 4])], PAD)
    assert batch.allowed_tokens is None and batch.trim().allowed_tokens is None
    undrawn = replace(trajectory([2, 3], []), allowed_tokens=((), ()))
    assert collate([undrawn, trajectory([2], [3])], PAD).allowed_tokens is None


def test_allowed_tokens_of_some_trajectories_are_refused():
    with pytest.raises(ValueError, match="in none: 1 of 3 lack them, trajectory 1 first"):
        collate([SETS[0], trajectory([2], [3]), SETS[2]], PAD)


@given(TRAJECTORIES, st.integers(1, 60), st.integers(0, 3))
def test_parts_of_a_batch_hold_the_sets_of_their_rows(trajectories, max_tokens, more):
    sets = [[()] * len(t.prompt_tokens) + [range(token) for token in t.sampled_tokens] for t in trajectories]
    batch = collate([replace(t, allowed_tokens=s) for t, s in zip(trajectories, sets, strict=True)], PAD)
    if not batch.mask.any():
        assert batch.allowed_tokens is None
        return
    batch = batch._replace(allowed_tokens=torch.nn.functional.pad(batch.allowed_tokens, (0, more), value=-1))
    for part in micro_batches(batch, max_tokens):
        allowed = part.batch.allowed_tokens
        assert allowed.shape[:2] == part.batch.tokens.shape
        for row, place in enumerate(part.places.tolist()):
            assert [[i for i in ids if i >= 0] for ids in allowed[row].tolist()[: len(sets[place])]] == [
                list(ids) for ids in sets[place]
            ]
        assert allowed.shape[2] == max(1, max(len(ids) for place in part.places.tolist() for ids in sets[place]))
        whole = part.of(batch.allowed_tokens)
        assert torch.equal(whole[..., : allowed.shape[2]], allowed)


def test_a_stand_in_allows_nothing():
    part = stand_in(collate(SETS, PAD))
    assert part.batch.allowed_tokens.tolist() == [[[-1], [-1]]] and part.batch.tokens.shape == (1, 2)
    assert part.batch.groups.shape == (1,) and part.of(torch.ones(3, 4, 5)).shape == (1, 2, 5)
