"""Comparisons for tests of what reads them."""

import torch

from rl_bridge.data.comparisons import collate_comparisons
from rl_bridge.data.trajectory import single_turn

PAD = 0


def random_comparisons(rows=7, sides=2, *, seed=0, ragged=False):
    """Unequal prompts and completions, a reference that disagrees with every model, labels that alternate."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, 15, (count,), generator=generator).tolist()

    comparisons = []
    for row in range(rows):
        prompt = ids(1, 6)
        present = 2 + row % (sides - 1) if ragged else sides
        comparisons.append([single_turn(prompt, ids(1, 8)) for _ in range(present)])
    batch = collate_comparisons(comparisons, PAD, desirable=[row % 2 == 0 for row in range(rows)])
    noise = 0.5 * torch.randn(batch.present.shape, generator=generator)
    return batch._replace(ref_logprobs=-2.7 * batch.counted() + noise)
