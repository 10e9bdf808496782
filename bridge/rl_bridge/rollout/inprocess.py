"""Generation in this process: any Hugging Face causal LM, batched, with a KV cache."""

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.data.requests import Message, Request, SamplingParams
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.engines.module import ParallelModule
from rl_bridge.engines.results import returns
from rl_bridge.models.encoding import encode_prompt, messages_of
from rl_bridge.models.source import ModelSource
from rl_bridge.rollout.token_sampler import request_seeds, token_sampler, uniform_numbers
from rl_bridge.weights import ModuleReceiver


class InProcessRollout:
    """The rollout worker of one device: its own copy of the weights, which a sync brings up to date."""

    def __init__(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, max_batch_rows: int = 1024) -> None:
        """The model begins with the source's weights. Rows beyond ``max_batch_rows`` wait: that bounds the KV cache."""
        with torch.device("meta"):
            self._model = source.empty().eval().requires_grad_(False)
        source.load(self._model)
        self._weights = _Weights(self._model)
        self._tokenizer = tokenizer
        self._eos, self._pad = _token_id(tokenizer, "eos_token"), _token_id(tokenizer, "pad_token")
        self._max_batch_rows = max_batch_rows

    @returns("rows")
    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[list[Trajectory]]:
        """``sampling.n`` trajectories of each request, in the order of the requests."""
        version = self.weights_version()
        if not requests:
            return []
        encoded = [encode_prompt(self._tokenizer, request.prompt) for request in requests]
        device, n = self.weights_device(), sampling.n
        seeds = request_seeds([request.id for request in requests], n, device)
        # Prompts of similar length go together, so that little is padding.
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        made: dict[int, list[Trajectory]] = {}
        together = max(1, self._max_batch_rows // n)
        for start in range(0, len(order), together):
            chosen = order[start : start + together]
            rows = self._decode([encoded[i] for i in chosen], seeds[torch.tensor(chosen, device=device)], sampling)
            for i in chosen:
                said = messages_of(requests[i].prompt)
                made[i] = [
                    self._trajectory(requests[i], sample, encoded[i], said, *next(rows), version) for sample in range(n)
                ]
        return [made[i] for i in range(len(requests))]

    def weight_receiver(self) -> ModuleReceiver:
        """What a sync to here fills."""
        return self._weights.weight_receiver()

    @returns("same")
    def weights_version(self) -> int:
        """The version of the weights in use."""
        return self.weight_receiver().usable_version()

    def weights_device(self) -> torch.device:
        """Where the weights are."""
        return self._model.device

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights (to ``meta``: free them). A KV cache lives only during a call, so there is none to move."""
        if what == "weights":
            self._weights.move(what, device)

    def _trajectory(
        self,
        request: Request,
        sample: int,
        prompt: list[int],
        said: tuple[Message, ...],
        tokens: list[int],
        logprobs: list[float],
        version: int,
    ) -> Trajectory:
        finished = tokens[-1] == self._eos
        text = str(self._tokenizer.decode(tokens[:-1] if finished else tokens))
        return single_turn(
            prompt,
            tokens,
            logprobs=logprobs,
            version=version,
            finish_reason="stop" if finished else "length",
            request_id=(*request.id, sample),
            group=request.group,
            messages=(*said, {"role": "assistant", "content": text}),
        )

    def _decode(
        self, prompts: list[list[int]], seeds: torch.Tensor, sampling: SamplingParams
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of ``sampling.n`` rows a prompt, up to and with the end-of-sequence token.

        A prompt is read once: its keys and values are then repeated for its samples. ``seeds`` is [prompts, n].
        """
        device, eos, pad = self.weights_device(), self._eos, self._pad
        sample, steps, count = token_sampler(sampling), sampling.max_new_tokens, len(prompts) * sampling.n
        width = max(len(ids) for ids in prompts)
        tokens = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        padding = torch.tensor([width - len(ids) for ids in prompts], device=device)
        columns = torch.arange(width, device=device)
        attended = (columns >= padding[:, None]) if bool(padding.any()) else None
        positions = (columns - padding[:, None]).clamp(min=0)
        cache = DynamicCache()
        logits = self._forward(tokens, attended, positions, cache)
        if sampling.n > 1:
            cache.batch_repeat_interleave(sampling.n)
            logits, padding = (value.repeat_interleave(sampling.n, 0) for value in (logits, padding))
            attended = None if attended is None else attended.repeat_interleave(sampling.n, 0)
        seeds, live = seeds.reshape(-1), torch.arange(count, device=device)
        sampled = torch.full((count, steps), pad, device=device)
        logprobs = torch.zeros((count, steps), device=device)
        lengths = torch.full((count,), steps, device=device)
        running = torch.ones(count, dtype=torch.bool, device=device)
        for position in range(steps):
            chosen, chosen_logprobs = sample(logits, uniform_numbers(seeds[live], position))
            sampled[live, position], logprobs[live, position] = chosen, chosen_logprobs
            ended = running & (chosen == eos)
            lengths[live[ended]] = position + 1
            running &= ~ended
            left = int(running.sum())
            if left == 0 or position + 1 == steps:
                break
            # Finished rows leave the batch once they are a quarter of it: copying the cache costs about one step.
            if 4 * left <= 3 * len(running):
                keep = running.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                live, chosen, running = live[keep], chosen[keep], running[keep]
                attended = None if attended is None else attended[keep]
            if attended is not None:
                attended = torch.cat([attended, attended.new_ones(len(live), 1)], 1)
            positions = (width + position - padding[live])[:, None]
            logits = self._forward(chosen[:, None], attended, positions, cache)
        for row, row_logprobs, length in zip(sampled.tolist(), logprobs.tolist(), lengths.tolist(), strict=True):
            yield row[:length], row_logprobs[:length]

    def _forward(
        self, tokens: torch.Tensor, attended: torch.Tensor | None, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits after the last token of each row; the cache grows by the tokens."""
        return self._model(
            input_ids=tokens,
            attention_mask=attended,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class _Weights(ParallelModule):
    """The model's weights as engines move, free and sync them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def exported(self) -> PreTrainedModel:
        """The model, under its own names."""
        return self.model


def _token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    value = getattr(tokenizer, f"{name}_id")
    if not isinstance(value, int):
        raise ValueError(f"the tokenizer needs an {name} with one id, its {name}_id is {value!r}")
    return value
