"""Log-probabilities of tokens: how they are scored, and a frozen model that scores them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rl_bridge.data.micro_batches import MicroBatch, micro_batches, restore, stand_in
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.module import ParallelModule
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.parallel.documents import Documents
from rl_bridge.weights import named_weights, replace_parameters
from rl_kernels import logits_logprobs


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How the probability of a token is computed. Policy, old policy and reference of a run share one.

    Two models with the same weights then have the same log-probabilities: their KL is 0 and their ratio 1.
    """

    temperature: float = 1.0
    """Divides the logits. It is the temperature that the completions were sampled at."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward pass, with the padding there is. More cost memory, and fewer cost time."""
    packing: bool = False
    """Rows lie one behind another instead of each padded to the longest beside it. The results are the same."""
    softcap: float | None = None
    """softcap · tanh(logits / softcap), on top of what the model itself does to its logits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the model's matrix products. Weights and log-probabilities stay in float32."""

    def __post_init__(self) -> None:
        """Refuse what no distribution has."""
        if not (self.temperature > 0 and self.micro_batch_tokens > 0 and (self.softcap is None or self.softcap > 0)):
            raise ValueError(f"need temperature > 0, micro_batch_tokens > 0 and softcap > 0 or None, got {self}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")


class TokenScorer(ParallelModule):
    """A causal LM that scores tokens. On its own it has no optimiser: a frozen reference is one."""

    def __init__(self, model: PreTrainedModel, scoring: ScoringConfig) -> None:
        """``model`` is switched to evaluation: with dropout, no model would agree with its own copy."""
        super().__init__()
        self.model = model.eval()
        use_rl_fn_attention(self.model)
        self.scoring = scoring
        self._freed, self._home = False, self.weights_device()

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the tokens that count, [N, L] each, zero where masked."""
        self._refuse_freed()
        # Position t predicts token t + 1: shifted before rows are packed, so that no document predicts the next one's.
        targets, counted = (torch.nn.functional.pad(x[:, 1:], (0, 1)) for x in (batch.tokens, batch.mask))
        if not self.scoring.packing:
            # Padding is on the right, where attention is causal and needs no mask.
            scores = self._scores(batch.tokens, targets, counted, use_cache=False)
        else:
            documents = Documents(batch.lengths)
            packed = (documents.take(x) for x in (batch.tokens, targets, counted))
            scores = documents.put(self._scores(*packed, **documents.forward_kwargs), batch.tokens.shape)
        scores = torch.nn.functional.pad(scores[:, :-1], (0, 0, 1, 0)).masked_fill(~batch.mask[..., None], 0.0)
        logprobs, entropies = scores.unbind(-1)
        return logprobs, entropies

    def _scores(
        self, tokens: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Log-probabilities and entropies [N, T, 2] of ``targets``; only columns in which some count are computed."""
        columns = counted.any(0).nonzero()[:, 0]
        columns = columns if len(columns) else columns.new_zeros(1)
        # Switched off as well as on: a caller's own autocast would score a policy otherwise than its reference.
        low = self.scoring.dtype == "bfloat16"
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=low):
            logits = self.model(input_ids=tokens, logits_to_keep=columns, **options).logits
        result = logits_logprobs(
            logits, targets[:, columns], temperature=self.scoring.temperature, softcap=self.scoring.softcap
        )
        scores = torch.stack([result.logprobs, result.entropy], -1)
        return scores.new_zeros((*tokens.shape, 2)).index_copy(1, columns, scores)

    def micro_batches(self, batch: TokenBatch) -> list[MicroBatch]:
        """The batch in parts that one forward pass takes; one of a batch without rows too."""
        parts = micro_batches(batch, self.scoring.micro_batch_tokens, packing=self.scoring.packing)
        return parts or [stand_in(batch)]

    @torch.no_grad()
    def token_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probabilities of the tokens that count under the present weights, [N, L], zero where masked."""
        parts = self.micro_batches(batch)
        return restore([(part.places, self(part.batch)[0]) for part in parts], batch.tokens)

    def scoring_config(self) -> ScoringConfig:
        """How this module scores."""
        return self.scoring

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(Hugging Face name, tensor, checksum) of every parameter."""
        self._refuse_freed()
        return named_weights(self.model)

    def weights_device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def checkpoint_state(self) -> dict[str, Any]:
        """The weights: all that a checkpoint of a frozen model holds."""
        return {"model": self.model.state_dict()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        if self.weights_device().type == "meta":
            self.move("weights", self._home)
        self.model.load_state_dict(state["model"])
        self._freed = False

    def save_pretrained(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self.model.save_pretrained(folder)

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights. Weights that were freed (``meta``) come back by a checkpoint. There is nothing else."""
        if what != "weights":
            return
        if device.type == "meta" and not self._freed:
            self._freed, self._home = True, self.weights_device()
        if "meta" in (device.type, self.weights_device().type):
            self._follow(replace_parameters(self.model, device))
        if device.type != "meta":
            self.model.to(device=device)  # pyright: ignore[reportCallIssue]

    def _follow(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Called when parameters were replaced by others: old → new."""

    def _refuse_freed(self) -> None:
        if self._freed:
            raise ValueError("these weights were freed: load a checkpoint (load_checkpoint_state) first")
