"""A batch of a policy's step, with everything that an objective may ask for."""

import torch

from tests.support.trajectories import random_batch


def make_batch(rows=6, seed=0):
    """Unequal prompts and completions; π_old, μ and π_ref of some other model; two rows without advantage."""
    batch, g = random_batch(rows, seed), torch.Generator().manual_seed(seed)

    def noise(scale):
        return (-2.7 + scale * torch.randn(batch.mask.shape, generator=g)).masked_fill(~batch.mask, 0.0)

    advantages = torch.randn(rows, 1, generator=g) * torch.tensor([1.0, 1, 0, 1, 0, 1])[:rows, None]
    return batch._replace(
        rollout_logprobs=noise(0.3),
        old_logprobs=noise(0.3),
        ref_logprobs=noise(0.3),
        advantages=advantages.expand(batch.mask.shape) * batch.mask,
    )
