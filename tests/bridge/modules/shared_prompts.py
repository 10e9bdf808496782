"""Groups of completions of one prompt, and a step over them."""

import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.modules.policy import mean
from rl_bridge.modules.scoring import ScoringConfig

APART = ScoringConfig(micro_batch_tokens=10**6, share_prefixes=False)
PROMPTS = {"long": [5, 6, 7, 8, 9, 10, 11, 12], "one token": [4], "other": [9, 3, 5], "alone": [7, 2, 2]}


def turns(prompt, *parts, group):
    """A conversation: completions that count, and between them tokens of a tool that do not."""
    tokens, counted = list(prompt), [False] * len(prompt)
    for number, part in enumerate(parts):
        tokens += part
        counted += [number % 2 == 0] * len(part)
    return Trajectory(
        tokens=tuple(tokens),
        loss_mask=tuple(counted),
        logprobs=(0.0,) * len(tokens),
        weights_versions=(-1,) * len(tokens),
        finish_reason="stop",
        group=group,
    )


def trajectories():
    long, one, other, alone = PROMPTS.values()
    equal = [single_turn(other, [3, 4, 5], group=2) for _ in range(3)]
    several = [turns(long, [3, 4], [2, 2, 2], [5], group=3), turns(long, [3, 4], [2, 2, 6], [5, 5, 9], group=3)]
    # Begins alike, and the mask says otherwise from the second drawn token on.
    several.append(turns(long, [3], [4, 2, 2], [5], group=3))
    return [
        *(single_turn(long, [3 + i] * (1 + 3 * i), group=0) for i in range(4)),
        *(single_turn(one, [2 + i, 7], group=1) for i in range(2)),
        *equal,
        *several,
        single_turn(alone, [6, 6], group=4),
    ]


def make_batch(drop=()):
    batch = collate([t for i, t in enumerate(trajectories()) if i not in drop], 0)
    g = torch.Generator().manual_seed(5)
    noise = (-2.7 + 0.3 * torch.randn((3, *batch.mask.shape), generator=g)).masked_fill(~batch.mask, 0.0)
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    advantages = torch.randn(len(batch.lengths), 1, generator=g) * batch.mask
    order = torch.randperm(len(batch.lengths), generator=g)  # groups need not be neighbours
    return batch._replace(advantages=advantages, **dict(zip(names, noise, strict=True))).rows(order)


def step(module, scoring, batch):
    module.scoring = scoring
    module.zero_grad()
    metrics = {name: mean(value) for name, value in module.train_step(batch, 7.0).items()}
    return torch.cat([p.grad.flatten() for p in module.model.parameters()]), metrics
