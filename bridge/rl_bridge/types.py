"""What travels between rollouts and trainers: sampling parameters, completions, and the tensors of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
"""Text, chat messages (``{"role": ..., "content": ...}``), or token ids that are used as they are."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are sampled. ``temperature`` 0 is greedy; ``n`` completions a prompt.

    A token depends on ``seed``, the prompt's place in the call, the sample's number and the position alone: not on
    how the rows were batched.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, naming the argument."""
        if self.max_new_tokens < 1 or self.n < 1:
            raise ValueError(f"max_new_tokens and n must be ≥ 1, got {self.max_new_tokens} and {self.n}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be ≥ 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be ≥ 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")


@dataclass(frozen=True)
class Completion:
    """One completion. ``logprobs[t]`` belongs to ``token_ids[t]``, under the distribution that sampled it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finished: bool
    """True if it ends with the end-of-sequence token (the last of ``token_ids``), False if it ran out of length."""
    weights_version: int = field(default=0, compare=False)


class TokenBatch(NamedTuple):
    """Prompts padded on the left to P columns, completions padded on the right to T columns. N rows.

    ``mask`` [N, T] is True on completion tokens; ``padding`` [N] counts the pad tokens before a prompt. Fields that a
    stage has not filled yet are None.
    """

    input_ids: torch.Tensor
    padding: torch.Tensor
    completion_ids: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenBatch":
        """The batch with ``function`` applied to every field that is present."""
        fields: Any = (None if value is None else function(value) for value in self)
        return TokenBatch(*fields)

    def rows(self, index: torch.Tensor | slice) -> "TokenBatch":
        """The chosen rows."""
        return self.map(lambda value: value[index])

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The batch on a device."""
        return self.map(lambda value: value.to(device))

    def trim(self) -> "TokenBatch":
        """Drop the columns that are padding in every row: fewer tokens, the same numbers."""
        width, columns = self.completion_ids.shape[1], self.mask.any(0).nonzero()
        kept = int(columns[-1]) + 1 if len(columns) else 1  # masked columns in between (a tool's output) stay
        left = int(self.padding.min())
        batch = self.map(lambda value: value if value.dim() < 2 else value[:, :kept])
        stop = self.input_ids.shape[1] - (width - kept)
        return batch._replace(input_ids=self.input_ids[:, left:stop], padding=self.padding - left)

    def micro_batches(self, max_tokens: int) -> Iterator["TokenBatch"]:
        """Consecutive rows, cut so that a part holds ``max_tokens`` tokens at most, or one row."""
        rows = max(1, max_tokens // self.input_ids.shape[1])
        for start in range(0, self.input_ids.shape[0], rows):
            yield self.rows(slice(start, start + rows)).trim()


def collate(completions: Sequence[Completion], pad_token_id: int) -> TokenBatch:
    """Completions → a padded batch with the log-probabilities kept from sampling time."""
    if not completions:
        raise ValueError("cannot make a batch of no completions")
    prompt_width = max(len(c.prompt_ids) for c in completions)
    width = max(1, *(len(c.token_ids) for c in completions))
    rows = len(completions)
    input_ids = torch.full((rows, prompt_width + width), pad_token_id)
    mask = torch.zeros((rows, width), dtype=torch.bool)
    logprobs = torch.zeros((rows, width))
    for i, completion in enumerate(completions):
        start, length = prompt_width - len(completion.prompt_ids), len(completion.token_ids)
        input_ids[i, start:prompt_width] = torch.tensor(completion.prompt_ids)
        input_ids[i, prompt_width : prompt_width + length] = torch.tensor(completion.token_ids)
        mask[i, :length] = True
        logprobs[i, :length] = torch.tensor(completion.logprobs)
    padding = torch.tensor([prompt_width - len(c.prompt_ids) for c in completions])
    return TokenBatch(input_ids, padding, input_ids[:, prompt_width:].contiguous(), mask, rollout_logprobs=logprobs)
