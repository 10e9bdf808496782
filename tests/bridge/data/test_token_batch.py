from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.micro_batches import micro_batches, padded_rows, restore
from rl_bridge.data.token_batch import TokenBatch, collate
from tests.bridge.data.trajectories import PAD, TRAJECTORIES, trajectory, unpadded, widened


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
