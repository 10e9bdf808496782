"""``TokenBatch``: the tensors that travel between rollouts and trainers, under the names of ``rl_fn.Batch``."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from rl_bridge.data.trajectory import Trajectory


class TokenBatch(NamedTuple):
    """N trajectories of up to L tokens, prompt included, padded on the right. ``x[n, t]`` belongs to ``tokens[n, t]``.

    Fields that a stage has not filled yet are None. What lies where ``mask`` is False counts nowhere.
    """

    tokens: torch.Tensor
    """[N, L] int64."""
    mask: torch.Tensor
    """[N, L] bool: tokens that count in a loss. Holes are allowed; the first column is False."""
    lengths: torch.Tensor
    """[N] int64: tokens of each row; behind them is padding."""
    groups: torch.Tensor
    """[N] int64: equal for rows of one prompt."""
    rollout_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenBatch":
        """The batch with ``function`` applied to every field that is present."""
        fields: Any = (None if value is None else function(value) for value in self)
        return TokenBatch(*fields)

    def row_tokens(self) -> list[int]:
        """Tokens of each row: what an engine balances its workers by."""
        return self.lengths.tolist()

    def rows(self, index: torch.Tensor | slice) -> "TokenBatch":
        """The chosen rows."""
        return self.map(lambda value: value[index])

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The batch on a device."""
        return self.map(lambda value: value.to(device))

    def trim(self) -> "TokenBatch":
        """Drop the columns that are padding in every row: fewer tokens, the same numbers. One column stays."""
        width = max(1, int(self.lengths.max())) if len(self.lengths) else 1
        return self.map(lambda value: value if value.dim() < 2 else value[:, :width])


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> TokenBatch:
    """Trajectories → a padded batch with the log-probabilities kept from sampling time.

    Raises:
        ValueError: for no trajectories.
    """
    if not trajectories:
        raise ValueError("cannot make a batch of no trajectories")
    lengths = torch.tensor([len(t.tokens) for t in trajectories])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(values: Iterable[Sequence[Any]], empty: torch.Tensor) -> torch.Tensor:
        # One tensor of all tokens: one of each row would take longer than a small model's forward pass.
        empty[inside] = torch.tensor(list(chain.from_iterable(values)), dtype=empty.dtype)
        return empty

    return TokenBatch(
        padded((t.tokens for t in trajectories), torch.full(inside.shape, pad_token_id)),
        padded((t.loss_mask for t in trajectories), torch.zeros_like(inside)),
        lengths,
        torch.tensor([t.group for t in trajectories]),
        rollout_logprobs=padded((t.logprobs for t in trajectories), torch.zeros(inside.shape)),
    )
