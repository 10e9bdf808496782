"""What every trainable module of a causal LM needs: log-probabilities, an optimiser step, its state, its weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rl_bridge.types import TokenBatch
from rl_bridge.weights import named_weights, replace_parameters
from rl_kernels import logits_logprobs


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a decay that reaches ``final`` of the learning rate after the last update."""

    learning_rate: float
    warmup: int = 10
    decay: Literal["constant", "linear", "cosine"] = "linear"
    final: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a learning rate or a gradient norm that cannot train."""
        if not (self.learning_rate > 0 and self.max_grad_norm > 0 and self.warmup >= 0 and 0 <= self.final <= 1):
            raise ValueError(f"need learning_rate > 0, max_grad_norm > 0, warmup ≥ 0 and final in [0, 1], got {self}")

    def scale(self, step: int, total: int) -> float:
        """The share of the learning rate that update ``step`` (from 0) of ``total`` is made with."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        remaining = 1 - done if self.decay == "linear" else float(0.5 * (1 + torch.cos(torch.tensor(done * torch.pi))))
        return self.final + (1 - self.final) * remaining


class CausalLMModule(torch.nn.Module):
    """A causal LM with its optimiser and schedule. ``updates`` is the number of updates the schedule is made for."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig,
        *,
        updates: int,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        first_version: int = 0,
    ) -> None:
        """``first_version``: updates that this model had before, so that versions never go back."""
        super().__init__()
        self.model = model
        self.optimizer_config = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: optimizer.scale(step, updates))
        self._version = first_version
        self._freed, self._home = False, self.weights_device()

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the completion tokens, [N, T] each.

        Only the T positions that predict a completion token reach the vocabulary. Pad columns on the right need no
        mask (attention is causal); those on the left do.
        """
        self._refuse_freed()
        width = batch.completion_ids.shape[1]
        arguments: dict[str, Any] = {}
        if bool((batch.padding > 0).any()):
            columns = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
            attended = columns >= batch.padding[:, None]
            arguments = {"attention_mask": attended, "position_ids": (columns - batch.padding[:, None]).clamp(min=0)}
        logits = self.model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=width + 1, **arguments).logits
        result = logits_logprobs(logits[:, :-1], batch.completion_ids, temperature=self.temperature)
        return result.logprobs, result.entropy

    @torch.no_grad()
    def token_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probabilities of the completion tokens under the present weights, [N, T], zero where masked."""
        rows = []
        for piece in batch.micro_batches(self.micro_batch_tokens):
            logprobs = self(piece)[0].masked_fill(~piece.mask, 0.0)
            rows.append(torch.nn.functional.pad(logprobs, (0, batch.mask.shape[1] - logprobs.shape[1])))
        return torch.cat(rows)

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule. A gradient that is not finite stops the run before it spoils a weight."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optimizer_config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise FloatingPointError(f"the gradient norm is {float(norm)} at update {self._version + 1}")
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._version += 1
        return {"grad_norm": float(norm), "learning_rate": rate}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(Hugging Face name, tensor, checksum) of every parameter."""
        self._refuse_freed()
        return named_weights(self.model)

    def weights_version(self) -> int:
        """The number of updates this model has had."""
        return self._version

    def weights_device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def training_state(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "version": self._version,
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take back what ``training_state`` gave."""
        if self.weights_device().type == "meta":
            self.move("weights", self._home)
        self.model.load_state_dict(state["model"])
        self._freed = False
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._version = state["version"]

    def save_pretrained(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self.model.save_pretrained(folder)

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights or the optimiser's state. Freed (``meta``) training weights come back by a checkpoint."""
        if what == "weights":
            if device.type == "meta" and not self._freed:
                self._freed, self._home = True, self.weights_device()
            if "meta" in (device.type, self.weights_device().type):
                self._follow(replace_parameters(self.model, device))
            if device.type != "meta":
                self.model.to(device=device)  # pyright: ignore[reportCallIssue]
        else:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    # AdamW keeps its step counts on the host.
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[key] = value.to(device)

    def _follow(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Point the optimiser at the parameters that took the place of others."""
        for group in self.optimizer.param_groups:
            group["params"] = [replaced[parameter] for parameter in group["params"]]
        for old, new in replaced.items():
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)

    def _refuse_freed(self) -> None:
        if self._freed:
            raise ValueError("these weights were freed: load a checkpoint (load_training_state) first")
