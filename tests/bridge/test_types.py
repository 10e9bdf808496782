import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.types import Completion, TokenBatch, collate

PAD = 0
TOKENS = st.integers(2, 14)


def completion(prompt, tokens):
    return Completion(prompt, tokens, [-0.5 - t for t in tokens], "", True)


COMPLETIONS = st.lists(
    st.builds(completion, st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=6)),
    min_size=1,
    max_size=7,
)


def unpadded(batch):
    """What each row says, whatever the padding: prompt, tokens, log-probabilities."""
    width = batch.completion_ids.shape[1]
    rows = []
    for i in range(len(batch.mask)):
        prompt = batch.input_ids[i, int(batch.padding[i]) : batch.input_ids.shape[1] - width]
        counted = batch.mask[i]
        assert torch.equal(batch.input_ids[i, batch.input_ids.shape[1] - width :], batch.completion_ids[i])
        rows.append(
            (prompt.tolist(), batch.completion_ids[i][counted].tolist(), batch.rollout_logprobs[i][counted].tolist())
        )
    return rows


@given(COMPLETIONS)
def test_collate_keeps_every_token_and_its_logprob(completions):
    batch = collate(completions, PAD)
    wanted = [(c.prompt_ids, c.token_ids, torch.tensor(c.logprobs).tolist()) for c in completions]
    assert unpadded(batch) == wanted
    assert bool((batch.completion_ids[~batch.mask] == PAD).all())
    for i in range(len(completions)):
        assert bool((batch.input_ids[i, : int(batch.padding[i])] == PAD).all())


def test_no_completions():
    with pytest.raises(ValueError, match="cannot make a batch of no completions"):
        collate([], PAD)


@given(COMPLETIONS, st.integers(1, 60))
def test_micro_batches_are_the_batch_in_parts_no_wider_than_needed(completions, max_tokens):
    batch = collate(completions, PAD)
    parts = list(batch.micro_batches(max_tokens))
    assert [row for part in parts for row in unpadded(part)] == unpadded(batch)
    for part in parts:
        assert len(part.mask) == 1 or part.input_ids.numel() <= max_tokens
        assert bool((part.padding == 0).any())
        assert part.mask.shape[1] == 1 or bool(part.mask.any(0)[-1])


def test_masked_tokens_in_the_middle_are_not_cut_off():
    """A tool's output between two turns is masked for every row of the part, and what follows it is not."""
    batch = collate([completion([2], [3, 4, 5, 6])], PAD)
    mask = torch.tensor([[True, False, True, False]])
    part = batch._replace(mask=mask).trim()
    assert part.completion_ids.tolist() == [[3, 4, 5]] and part.mask.tolist() == [[True, False, True]]
    assert part.input_ids.tolist() == [[2, 3, 4, 5]]


def test_rows_map_and_devices_reach_every_field_that_is_there():
    batch = collate([completion([2], [3, 4]), completion([5, 6], [7])], PAD)._replace(advantages=torch.ones(2, 2))
    chosen = batch.rows(torch.tensor([1]))
    assert chosen.input_ids.tolist() == [[5, 6, 7, 0]] and chosen.old_logprobs is None
    assert all(len(value) == 1 for value in chosen if value is not None)
    assert all(a is None or torch.equal(a, b) for a, b in zip(batch.to("cpu"), batch, strict=True))
    assert isinstance(batch.map(torch.clone), TokenBatch)
