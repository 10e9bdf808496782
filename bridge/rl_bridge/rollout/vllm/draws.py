"""What rl_bridge changes and reads where an engine of vLLM draws: random numbers by place, and the allowed tokens.

vLLM gives each seeded request a generator that goes on from draw to draw. A request that is read in pieces, or again
after it was pre-empted, then depends on how the scheduler cut it, and on a CPU such a request ends the engine ("CPU
Generator does not use offset"). Here the random numbers of a draw depend on the request's seed and the draw's number.
"""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from rl_bridge.data.requests import SamplingParams
from rl_bridge.splitmix64 import logical_shift, mix

EXTRA = "rl_fn"
"""Key of ``SamplingParams.extra_args``."""


class DrawsOf(NamedTuple):
    """What the sampler must know of a request."""

    seed: int
    """64 bits, int64."""
    drawn: int
    """Number of the request's first draw: tokens that the policy drew before in this sequence."""
    truncated: bool
    """Whether the allowed tokens are recorded."""


class Draws:
    """What works around the sampler of an engine whose worker is in this process."""

    def __init__(self) -> None:
        """Attached to no engine yet."""
        self._runner: Any = None
        self._generators: list[torch.Generator] = []
        self._allowed: dict[str, list[array]] = {}
        self._others: dict[torch.device, torch.Generator] = {}

    def attach(self, engine: Any) -> None:
        """Work in this engine from now on; what was recorded of another is forgotten.

        Raises:
            NotImplementedError: for an engine with another sampler than vLLM's first model runner has.
        """
        self.attach_to(engine.model_executor.driver_worker.model_runner)

    def attach_to(self, runner: Any) -> None:
        """As ``attach``, in the process of the engine's worker."""
        self._runner = runner
        sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
        if sampler is None or runner.vllm_config.use_v2_model_runner:
            raise NotImplementedError(
                "draws are made repeatable in vLLM's first model runner; VLLM_USE_V2_MODEL_RUNNER=1 asks for another"
            )
        self._allowed.clear()
        sampler.forward = partial(self._draw, sampler.forward)

    def take_allowed(self, request_id: str, count: int) -> list[array]:
        """The ids that were allowed at each of the request's ``count`` draws, rising; they are forgotten here."""
        found = self._allowed.pop(request_id, [])[:count]
        assert len(found) == count, f"{len(found)} draws of request {request_id} were seen, and it has {count} tokens"
        return found

    def forget(self, request_id: str) -> None:
        """Drop what was recorded of a request that ended otherwise."""
        self._allowed.pop(request_id, None)

    def _draw(self, forward: Callable[..., Any], logits: torch.Tensor, given: dict, top_k: Any, top_p: Any) -> Any:
        """The sampler's own forward, with each row's generator at the draw's number."""
        with _OwnNumbers(self._others):
            output = forward(logits, self._seeded(logits.device, given), top_k, top_p)
        self._note_allowed(output[1])
        return output

    def _seeded(self, device: torch.device, given: dict[int, torch.Generator]) -> dict[int, torch.Generator]:
        generators, lengths = dict(given), self._runner.optimistic_seq_lens_cpu
        places, states = [], []
        for row, request_id in enumerate(self._rows()):
            draws = self._draws(request_id)
            if draws is not None:
                number = draws.drawn + int(lengths[row]) - self._runner.requests[request_id].num_prompt_tokens
                places.append(row)
                states.append((draws.seed, number))
        while len(self._generators) < len(places):
            self._generators.append(torch.Generator(device=device))
        seeds, numbers = torch.tensor(states, dtype=torch.int64).view(-1, 2).unbind(1)
        bits = logical_shift(mix(mix(seeds) + numbers), 1).tolist()
        for row, generator, seed in zip(places, self._generators, bits, strict=False):
            generators[row] = generator.manual_seed(seed)
        return generators

    def _note_allowed(self, logprobs: torch.Tensor) -> None:
        discarded = self._runner.discard_request_mask.np
        for row, request_id in enumerate(self._rows()):
            draws = self._draws(request_id)
            if draws is None or not draws.truncated or discarded[row]:
                continue
            ids = (logprobs[row] > float("-inf")).nonzero()[:, 0].int().cpu().numpy()
            self._allowed.setdefault(external(request_id), []).append(array("i", ids.tobytes()))

    def _rows(self) -> list[str]:
        return self._runner.input_batch.req_ids

    def _draws(self, request_id: str) -> DrawsOf | None:
        given = (self._runner.requests[request_id].sampling_params.extra_args or {}).get(EXTRA)
        return None if given is None else DrawsOf(*given)


class _OwnNumbers(TorchFunctionMode):
    """Random numbers that nobody named a generator for come from one of ours, not from torch's: a trainer's thread may
    draw from that at the same moment. Works in the thread that enters it.

    On a CPU vLLM draws seeds of all rows so, before it looks for the generators of the requests.
    """

    def __init__(self, generators: dict[torch.device, torch.Generator]) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.randint, torch.Tensor.exponential_) and kwargs.get("generator") is None:
            device = args[0].device if func is torch.Tensor.exponential_ else torch.device(kwargs.get("device", "cpu"))
            if device not in self._generators:
                self._generators[device] = torch.Generator(device=device)
            kwargs["generator"] = self._generators[device]
        return func(*args, **kwargs)


def external(request_id: str) -> str:
    """The name that ``add_request`` was given, of a request as the engine calls it: vLLM adds random characters.

    >>> external("policy-7-1f3a9c02")
    'policy-7'
    """
    return request_id.rpartition("-")[0]


def truncation(sampling: SamplingParams) -> dict[str, float]:
    """The steps of truncation that can cut something off; none where sampling is greedy.

    >>> truncation(SamplingParams(max_new_tokens=1, top_p=1.0, min_p=0.1))
    {'min_p': 0.1}
    """
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.temperature == 0:
        return {}
    return {name: value for name, value in cuts.items() if value is not None and not (name == "top_p" and value == 1)}
