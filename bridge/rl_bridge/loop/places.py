"""Places of prompts that ``Groups.select`` chooses, in any of the forms that a user has them in.

It stands alone because it is about places, and no group.
"""

from collections import Counter
from typing import Any

import torch


def places_of(prompts: Any, count: int) -> torch.Tensor:
    """The places, of ``count`` prompts, that a mask or places in any form name."""
    chosen = torch.as_tensor(prompts)
    chosen = chosen[:, 0] if chosen.ndim == 2 and chosen.shape[1] == 1 else chosen  # of mask.nonzero()
    if chosen.ndim != 1:
        raise ValueError(
            f"select takes one place a prompt, a mask [{count}] of prompts or one of all their completions, got the "
            f"shape {list(chosen.shape)}"
        )
    if not len(chosen) and chosen.dtype != torch.bool:
        return torch.zeros(0, dtype=torch.int64)
    if chosen.dtype == torch.bool:
        if len(chosen) != count:
            raise ValueError(f"a mask has one entry for each of the {count} prompts, got {len(chosen)}")
        return chosen.nonzero()[:, 0].cpu()
    if chosen.is_floating_point() or chosen.is_complex():
        raise TypeError(f"select takes places or a mask of True and False, got {chosen.dtype}")
    places = [place + count if -count <= place < 0 else place for place in chosen.tolist()]
    if strange := [place for place in places if not 0 <= place < count]:
        raise ValueError(f"there is no prompt at place {strange[0]}: the places are 0 to {count - 1}")
    if twice := [place for place, times in Counter(places).items() if times > 1]:
        raise ValueError(f"place {twice[0]} is chosen twice: its completions would count twice in the update")
    return torch.tensor(places, dtype=torch.int64)
