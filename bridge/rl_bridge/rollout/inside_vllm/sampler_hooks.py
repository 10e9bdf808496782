"""Hooks where an engine of vLLM samples: random numbers by place, min-p last, allowed tokens; for servers, too.

vLLM gives each seeded request a generator that goes on from draw to draw. A request that is read in pieces, or again
after it was pre-empted, then depends on how the scheduler cut it, and on a CPU such a request ends the engine ("CPU
Generator does not use offset"). Here the random numbers of a draw depend on the request's seed and the draw's number.

vLLM cuts by min-p before top-k and top-p, which is another distribution than this library's order, top-k, top-p, min-p.
So a request's min-p comes here beside its seed, and vLLM is told of none.

A worker that cannot import this file does not start, and with it the server.
"""

# pyright: reportMissingImports=false

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from rl_bridge.common.splitmix64 import logical_shift, mix
from rl_bridge.rollout.inside_vllm.held_weights import held_by
from rl_bridge.rollout.inside_vllm.plugin import in_place

EXTRA = "rl_fn"
"""Key of ``SamplingParams.extra_args``."""


class DrawsOf(NamedTuple):
    """A request's part in its draws: seed, place and truncation."""

    seed: int
    """64 bits, int64."""
    drawn: int
    """Number of the request's first draw: tokens that the policy drew before in this sequence."""
    truncated: bool
    """Whether the allowed tokens are recorded."""
    min_p: float = 0.0
    """The cut after top-k and top-p."""


class _Row(NamedTuple):
    """A row of the batch whose request is of this package."""

    place: int
    request_id: str
    draws: DrawsOf
    number: int
    """Tokens that the request has drawn."""


class Draws:
    """A hook around the sampler of an engine whose worker is in this process."""

    def __init__(self) -> None:
        """Attached to no engine yet."""
        self._runner: Any = None
        self._generators: list[torch.Generator] = []
        self._allowed: dict[str, list[array]] = {}
        self._others: dict[torch.device, torch.Generator] = {}

    def attach(self, engine: Any) -> None:
        """Work in this engine from now on. Draws that an earlier engine has not given out yet stay recorded.

        Raises:
            NotImplementedError: for an engine with another sampler than vLLM's first model runner has.
        """
        self.attach_to(engine.model_executor.driver_worker.model_runner)

    def attach_to(self, runner: Any) -> None:
        """Work in the engine of this worker from now on, in the worker's process."""
        self._runner = runner
        sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
        if sampler is None or runner.vllm_config.use_v2_model_runner:
            raise NotImplementedError(
                "draws are made repeatable in vLLM's first model runner; VLLM_USE_V2_MODEL_RUNNER=1 asks for another"
            )
        sampler.forward = partial(self._draw, sampler.forward)

    def take_allowed(self, request_id: str, count: int) -> list[array]:
        """The ids that were allowed at each of the request's ``count`` draws, rising; they are forgotten here.

        Raises:
            RuntimeError: fewer draws were seen.
        """
        allowed = self._allowed.pop(request_id, [])[:count]
        if len(allowed) != count:
            raise RuntimeError(f"{len(allowed)} draws of request {request_id} were seen, and it has {count} tokens")
        return allowed

    def take_noted(self, request_id: str) -> list[array]:
        """The ids that were allowed at each recorded draw, none where nothing was recorded; they are forgotten here."""
        return self._allowed.pop(request_id, [])

    def forget(self, request_id: str) -> None:
        """Drop the notes of a request that ended otherwise."""
        self._allowed.pop(request_id, None)

    def _draw(self, forward: Callable[..., Any], logits: torch.Tensor, of_engine: dict, top_k: Any, top_p: Any) -> Any:
        """The sampler's own forward, with each row's generator at the draw's number, and min-p behind top-p."""
        rows = list(self._rows())
        if any(row.draws.min_p for row in rows):
            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # pyright: ignore[reportMissingImports]

            logits, top_k, top_p = _above_min_p(apply_top_k_top_p(logits, top_k, top_p), rows), None, None
        with _OwnNumbers(self._others):
            output = forward(logits, self._seeded(logits.device, of_engine, rows), top_k, top_p)
        self._note_allowed(output[1], rows)
        return output

    def _seeded(
        self, device: torch.device, of_engine: dict[int, torch.Generator], rows: list[_Row]
    ) -> dict[int, torch.Generator]:
        generators = dict(of_engine)
        states = [(row.draws.seed, row.draws.drawn + row.number) for row in rows]
        while len(self._generators) < len(rows):
            self._generators.append(torch.Generator(device=device))
        seeds, numbers = torch.tensor(states, dtype=torch.int64).view(-1, 2).unbind(1)
        bits = logical_shift(mix(mix(seeds) + numbers), 1).tolist()
        for row, generator, seed in zip(rows, self._generators, bits, strict=False):
            generators[row.place] = generator.manual_seed(seed)
        return generators

    def _note_allowed(self, logprobs: torch.Tensor, rows: list[_Row]) -> None:
        discarded = self._runner.discard_request_mask.np
        for row in rows:
            if not row.draws.truncated or discarded[row.place]:
                continue
            ids = (logprobs[row.place] > float("-inf")).nonzero()[:, 0].int().cpu().numpy()
            noted = self._allowed.setdefault(external(row.request_id), [])
            # A request that began again, under a new adapter or in a fresh engine, has the sets of its own draws alone.
            del noted[row.number :]
            noted.append(array("i", ids.tobytes()))

    def _rows(self) -> Iterator[_Row]:
        lengths = self._runner.optimistic_seq_lens_cpu
        for place, request_id in enumerate(self._runner.input_batch.req_ids):
            request = self._runner.requests[request_id]
            draws = (request.sampling_params.extra_args or {}).get(EXTRA)
            if draws is not None:
                yield _Row(place, request_id, DrawsOf(*draws), int(lengths[place]) - request.num_prompt_tokens)


def _above_min_p(logits: torch.Tensor, rows: Iterable[_Row]) -> torch.Tensor:
    """Logits over temperature, without tokens less than min-p times as probable as the most probable one."""
    share = torch.zeros(len(logits))
    for row in rows:
        share[row.place] = row.draws.min_p
    least = logits.amax(-1, keepdim=True) + share.log().to(logits.device)[:, None]
    return logits.masked_fill(logits < least, float("-inf"))


class _OwnNumbers(TorchFunctionMode):
    """Inside, random numbers without a generator come from one of ours, in the thread that enters the context.

    A trainer's thread may draw from torch's own at the same moment. On a CPU vLLM draws seeds of all rows without a
    generator, before it looks for the generators of the requests.
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


EXTENSION = f"{__name__}.InServer"
"""For ``--worker-extension-cls``."""


class InServer:
    """Methods that the worker class of vLLM gets in a server, for ``collective_rpc``; their results are JSON."""

    model_runner: Any
    list_loras: Callable[[], set[int]]
    add_lora: Callable[[Any], bool]
    _rl_fn_draws: Draws

    def rl_fn_begin(self) -> dict[str, Any]:
        """Let draws depend on the request alone, as in a worker's own engine; returns ``in_place`` of this process."""
        self._rl_fn_draws = Draws()
        self._rl_fn_draws.attach_to(self.model_runner)
        return in_place(self)

    def rl_fn_adopt(self, folder: str) -> list[int]:
        """Put the adapter in ``folder`` in the place of the one before; returns the numbers of all that are here.

        vLLM's own path for it keeps ``load_inplace`` in every later request: each would load its file again.
        """
        from vllm.lora.request import LoRARequest

        [number] = self.list_loras()
        self.add_lora(LoRARequest("rl_fn", number, folder, load_inplace=True))
        return sorted(self.list_loras())

    def rl_fn_held(self, folder: str, adapter: str | None) -> list[Any]:
        """A comparison of this worker's tensors with the weights, or the adapter, in a folder."""
        return held_by(self, folder, adapter)

    def rl_fn_allowed(self, name: str, count: int) -> list[list[int]]:
        """The ids that were allowed at each of a finished request's ``count`` draws, which are forgotten here."""
        return [ids.tolist() for ids in self._rl_fn_draws.take_allowed(name, count)]

    def rl_fn_noted(self, names: list[str]) -> dict[str, list[list[int]]]:
        """The notes of those of these requests that have any; they are forgotten here."""
        noted = {name: self._rl_fn_draws.take_noted(name) for name in names}
        return {name: [ids.tolist() for ids in rows] for name, rows in noted.items() if rows}
