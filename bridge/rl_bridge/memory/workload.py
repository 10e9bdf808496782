"""The rows of a step, of given lengths: what a plan is made for, and what a measurement runs."""

from dataclasses import dataclass

import torch

from rl_bridge.data.micro_batches import MicroBatch
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.messages import given


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Of the longest: ``prompts`` of ``prompt_tokens`` tokens, ``responses`` completions each of ``new_tokens``."""

    prompts: int
    responses: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Refuse a step without a token."""
        if min(self.prompts, self.responses, self.prompt_tokens, self.new_tokens) < 1:
            raise ValueError(
                "prompts, responses, prompt_tokens and new_tokens must be ≥ 1, got "
                f"{given(self, 'prompts', 'responses', 'prompt_tokens', 'new_tokens')}"
            )

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.responses

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return self.prompt_tokens + self.new_tokens

    def batch(self, vocabulary: int, *, seed: int = 0) -> TokenBatch:
        """Rows whose completions count, with what a policy's objective reads."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.rows, self.row_tokens
        tokens = torch.randint(1, max(2, vocabulary), shape, generator=generator)
        groups = torch.arange(self.prompts).repeat_interleave(self.responses)
        first = groups * self.responses
        tokens[:, : self.prompt_tokens] = tokens[first, : self.prompt_tokens]
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, self.prompt_tokens :] = True
        numbers = [torch.full(shape, value) for value in (-1.0, -1.0, 0.5)]
        return TokenBatch(
            tokens,
            mask,
            torch.full((self.rows,), self.row_tokens),
            groups,
            rollout_logprobs=numbers[0],
            old_logprobs=numbers[1],
            advantages=numbers[2],
        )


class Largest(list[MicroBatch]):
    """Two micro-batches in the place of many, and all of them kept: the most memory is needed with the largest.

    The one before brings gradients into being, which the largest then finds.
    """

    def __init__(self, parts: list[MicroBatch]) -> None:
        sizes = [int(part.batch.lengths.sum()) for part in parts]
        largest = max(range(len(parts)), key=lambda i: (sizes[i], i))
        others = sorted((i for i in range(len(parts)) if i != largest), key=lambda i: sizes[i])
        super().__init__(parts[i] for i in sorted([largest, *others[-1:]]))
        self.all = parts
