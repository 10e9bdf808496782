"""Trajectories and batches for tests of what reads them."""

import torch
from hypothesis import strategies as st

from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import requests_of, single_turn

PAD = 0
TOKENS = st.integers(2, 14)


def trajectory(prompt, completion, **fields):
    return single_turn(prompt, completion, logprobs=[-0.5 - t for t in range(len(completion))], **fields)


TRAJECTORIES = st.lists(
    st.builds(trajectory, st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=6)),
    min_size=1,
    max_size=7,
)


def random_batch(rows=6, seed=0):
    """Unequal prompts and completions, not scored by anyone yet."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, 15, (count,), generator=generator).tolist()

    return collate([single_turn(ids(1, 6), ids(2, 8)) for _ in range(rows)], PAD)


def widened(batch, columns, junk):
    """More padding columns, and junk in per-token fields where nothing counts."""

    def wider(name, value):
        if value is None or value.dim() < 2:
            return value
        if value.is_floating_point():
            value = value.masked_fill(~batch.mask, junk)
        return torch.nn.functional.pad(value, (0, columns), value=junk if value.is_floating_point() else 0)

    return TokenBatch(*(wider(name, value) for name, value in batch._asdict().items()))


def unpadded(batch):
    """What each row says, whatever the padding: tokens, the mask, and the log-probabilities of what counts."""
    return [
        (tokens[:length].tolist(), mask[:length].tolist(), logprobs[mask].tolist())
        for tokens, mask, length, logprobs in zip(
            batch.tokens, batch.mask, batch.lengths.tolist(), batch.rollout_logprobs, strict=True
        )
    ]


def generate(rollout, prompts, sampling):
    """The rollout worker's trajectories of bare prompts, one after another."""
    return [t for group in rollout.generate(requests_of(prompts, sampling.seed), sampling) for t in group]
