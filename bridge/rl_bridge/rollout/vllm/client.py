"""``EngineClient``, the protocol of an update of an engine of vLLM, and its form for an engine in this process."""

# pyright: reportMissingImports=false

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_bridge.rollout.inside_vllm.held_weights import Held, held_by
from rl_bridge.rollout.inside_vllm.plugin import PROTOCOL
from rl_bridge.rollout.inside_vllm.sampler_hooks import Draws
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.ranks import RankDied
from rl_bridge.rollout.vllm.request_fields import probe_fields
from rl_bridge.rollout.vllm.weight_probe import Drawn, EngineLimits

_ADAPTER = "rl_fn"
DEATHS = 3
"""Engines that may die in a row, without a request that ended in between."""

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine in this process, behind AsyncLLM, or behind HTTP: one protocol, in the order of an update.

    ``replace`` leaves the engine paused, with its version set, and the requests that it was working on begun again.
    Between ``pause`` and ``resume``, and after ``replace``, nothing but ``generate`` gives tokens out. Tokens that
    other requests of a server draw while ``generate`` works are kept until ``resume``, and thrown away by ``replace``.
    """

    def limits(self) -> EngineLimits:
        """Vocabulary, longest sequence, block of the prefix cache."""
        ...

    def pause(self) -> None:
        """Let no request draw; keep the running ones, and forget their keys and values and the prefix cache."""
        ...

    def is_paused(self) -> bool:
        """Whether the engine itself says that it is paused."""
        ...

    def start(self) -> None:
        """Begin an update."""
        ...

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """Load these tensors of the complete copy in ``folder``."""
        ...

    def finish(self, version: str) -> None:
        """End an update: all tensors came, and tokens drawn from now on are of this version."""
        ...

    def adopt(self, folder: Path, version: str) -> None:
        """Instead of ``start``, ``update``, ``finish``: draw with the LoRA adapter in ``folder`` from now on."""
        ...

    def version(self) -> str:
        """The version that the engine itself gives."""
        ...

    def held(self, folder: Path, adapter: Path | None = None) -> Held:
        """A comparison of all workers' tensors with the weights in ``folder``, or with the adapter that came last."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Whether the cache is empty now."""
        ...

    def generate(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> Drawn:
        """Draw exactly ``count`` tokens, end-of-sequence tokens included; works while the engine is paused."""
        ...

    def resume(self) -> None:
        """Let requests draw again."""
        ...

    def replace(self, folder: Path, version: str, adapter: Path | None = None) -> None:
        """Close the engine, open one from ``folder``, and begin again what was running. It is paused then.

        ``adapter``: the folder of an adapter that it draws with.
        """
        ...


def open_in_process(
    folder: Path, options: VLLMOptions, device: torch.device | None = None, draws: Draws | None = None
) -> "InProcessEngine":
    """An engine in this process that takes weights; ``device`` as ``open_engine`` has it, ``draws`` as ``opened``."""
    from rl_bridge.rollout.vllm.vllm_engine import close_engine, opened

    return InProcessEngine(partial(opened, options, device, draws or draws_of(options)), close_engine, folder)


def draws_of(options: VLLMOptions) -> Draws:
    """The hook around the sampler of such an engine."""
    if options.tensor_parallel_size == 1:
        return Draws()
    from rl_bridge.rollout.vllm.ranks import RankDraws

    return RankDraws()


def probe_sampling(*, max_tokens: int, seed: int, temperature: float) -> Any:
    """vLLM's parameters of a request that draws exactly ``max_tokens`` tokens, given out together."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = probe_fields(max_tokens=max_tokens, seed=seed, temperature=temperature)
    return SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)


class InProcessEngine:
    """An ``LLMEngine`` in this process that can be replaced: whoever adds requests holds this object.

    It has the methods of ``LLMEngine`` that a decoder calls, and those of ``EngineClient``.
    """

    def __init__(
        self,
        open_engine: Callable[[Path], Any],
        close_engine: Callable[[Any], None],
        folder: Path,
        *,
        timeout: float = 300.0,
        sampling: Callable[..., Any] | None = None,
    ) -> None:
        """``open_engine(folder)`` gives an ``LLMEngine``. ``timeout``: seconds that ``generate`` may take.

        ``sampling``: makes the engine's parameters of a probe; by default vLLM's.

        Raises:
            RuntimeError: the engine has no transfer engine of this package.
        """
        self._open, self._close, self._timeout = open_engine, close_engine, timeout
        self._sampling = probe_sampling if sampling is None else sampling
        self._running: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
        self._held: list[Any] = []
        self._probes = 0
        self._adapter: Any = None
        self._deaths = 0
        self.on_death: Callable[[], None] | None = None
        """Opens an engine in the place of one of which a rank died; None: the death is the caller's."""
        self.engine: Any = None
        self._open_from(folder)
        self.engine.set_weight_version("0")

    # The methods that a decoder calls.

    def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> None:
        """``LLMEngine.add_request``; the request is remembered until ``step`` gives its end out."""
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        self._add(request_id, prompt, params, options)
        self._running[request_id] = (prompt, params, options)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Forget these requests: nothing more of them is given out."""
        self.engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._held = [output for output in self._held if output.request_id in self._running]

    def take_ended(self, request_ids: Collection[str]) -> list[Any]:
        """Outputs of those of these requests that have ended, which ``step`` would give out next."""
        ended = [output for output in self._held if output.finished and output.request_id in request_ids]
        for output in ended:
            del self._running[output.request_id]
        self._held = [output for output in self._held if output.request_id in self._running]
        return ended

    def step(self) -> list[Any]:
        """``LLMEngine.step``, which gives nothing of an engine that is paused."""
        try:
            outputs, self._held = (self._held, []) if self._held else (self.engine.step(), [])
        except RankDied as death:
            self._deaths += 1
            if self.on_death is None or self._deaths > DEATHS:
                raise
            logger.warning("%s; the engine is replaced", death)
            self.on_death()
            return []
        for output in outputs:
            if output.finished:
                self._deaths = 0
                self._running.pop(output.request_id, None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has more to give."""
        return bool(self._running)

    @property
    def running(self) -> int:
        """Requests whose end was not given out."""
        return len(self._running)

    def close(self) -> None:
        """Close the engine and forget its requests."""
        engine, self.engine = self.engine, None
        self._running.clear()
        if engine is not None:
            self._close(engine)

    # The methods of EngineClient.

    def limits(self) -> EngineLimits:
        """The limits of the newest engine that there was: an update can bring a fresh one even where none is left."""
        return self._limits

    def pause(self) -> None:
        """``pause_scheduler("keep")``: running requests are pre-empted and read again after the update."""
        self._core.pause_scheduler("keep", clear_cache=True)

    def is_paused(self) -> bool:
        """The scheduler's state."""
        return bool(self._core.is_scheduler_paused())

    def start(self) -> None:
        """Begin an update in every worker of the engine."""
        self.engine.collective_rpc("start_weight_update")

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """Load these tensors in every worker of the engine."""
        info = {"folder": str(folder), "names": list(names)}
        self.engine.collective_rpc("update_weights", kwargs={"update_info": info})

    def finish(self, version: str) -> None:
        """End the update in every worker, then stamp outputs with the version."""
        self.engine.collective_rpc("finish_weight_update")
        self.engine.set_weight_version(version)

    def adopt(self, folder: Path, version: str) -> None:
        """Take the adapter in the place of the one before. Requests that run without an adapter begin again."""
        first = self._adapter is None
        self._load_adapter(folder, version)
        if first and self._running:
            self.engine.abort_request(list(self._running))
            self._begin_again()

    def _load_adapter(self, folder: Path, version: str) -> None:
        from vllm.lora.request import LoRARequest

        # vLLM knows an adapter by its number, and loads each once unless it is told to load it in place. Requests that
        # run have the number, too, and go on with the adapter that has the number then.
        self.engine.add_lora(LoRARequest(_ADAPTER, 1, str(folder), load_inplace=True))
        if (adapters := self.engine.list_loras()) != {1}:
            raise RuntimeError(f"the engine has adapters {sorted(adapters)} and not the one that it was given")
        self._adapter = LoRARequest(_ADAPTER, 1, str(folder))
        self.engine.set_weight_version(version)

    def version(self) -> str:
        """The version that outputs are stamped with."""
        return str(self.engine.get_weight_version())

    def held(self, folder: Path, adapter: Path | None = None) -> Held:
        """A comparison in every worker of the engine."""
        folders = (str(folder), None if adapter is None else str(adapter))
        return Held.of_ranks(self.engine.collective_rpc(held_by, args=folders))

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, blocks of running requests included: their tokens are read again."""
        return bool(self.engine.reset_prefix_cache(reset_running_requests=True))

    def generate(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> Drawn:
        """Step the engine until these tokens are drawn; other requests draw nothing meanwhile."""
        self._probes += 1
        name = f"rl_fn-probe-{self._probes}"
        params = self._sampling(max_tokens=count, seed=seed, temperature=temperature)
        paused = self.is_paused()
        if not paused:  # rows that run give up their seats, and are read again
            self._core.pause_scheduler("keep", clear_cache=bool(self._running))
        try:
            with self._alone():
                self._add(name, {"prompt_token_ids": list(prompt)}, params, {})
                return self._drawn(tuple(prompt), self._until_finished(name))
        finally:
            if not paused:
                self._core.resume_scheduler()

    def resume(self) -> None:
        """Let requests draw again."""
        self._core.resume_scheduler()

    def replace(self, folder: Path, version: str, adapter: Path | None = None) -> None:
        """Requests whose end was not given out begin again, each with its own seed."""
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                self._close(engine)
            except Exception:
                logger.exception("an engine of vLLM that is replaced did not close cleanly")
            del engine
        self._open_from(folder)
        self._core.pause_scheduler("keep", clear_cache=True)
        self.engine.set_weight_version(version)
        self._adapter = None
        if adapter is not None:
            self._load_adapter(adapter, version)
        self._begin_again()

    def _begin_again(self) -> None:
        ended = {output.request_id for output in self._held if output.finished}
        self._held = [output for output in self._held if output.request_id in ended]
        for request_id, (prompt, params, options) in self._running.items():
            if request_id not in ended:
                self._add(request_id, prompt, params, options)

    def _add(self, request_id: str, prompt: Any, params: Any, options: dict[str, Any]) -> None:
        if self._adapter is not None:
            options = {**options, "lora_request": self._adapter}
        self.engine.add_request(request_id, prompt, params.clone(), **options)

    def _open_from(self, folder: Path) -> None:
        engine = self._open(folder)
        try:
            info = {"protocol": PROTOCOL}
            engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
        except Exception as error:
            self._close(engine)
            raise RuntimeError(
                f"this engine of vLLM takes no weights from rl_bridge, its transfer engine is another's: {error}"
            ) from error
        self.engine = engine
        model, cache = engine.vllm_config.model_config, engine.vllm_config.cache_config
        block = cache.block_size if cache.enable_prefix_caching else 0
        self._limits = EngineLimits(model.get_vocab_size(), model.max_model_len, block)

    @property
    def _core(self) -> Any:
        return self.engine.engine_core.engine_core

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A paused engine whose requests wait aside: behind more of them than seats, a probe would come last."""
        scheduler = self._core.scheduler
        others, scheduler.waiting = scheduler.waiting, type(scheduler.waiting)()
        self._core.resume_scheduler()
        try:
            yield
        finally:
            scheduler.waiting = others
            self._core.pause_scheduler("keep", clear_cache=False)

    def _until_finished(self, name: str) -> Any:
        limit = time.monotonic() + self._timeout
        while True:
            for output in self.engine.step():
                if output.request_id != name:
                    self._held.append(output)  # of a batch that was on its way before the pause
                elif output.finished:
                    return output
            if time.monotonic() > limit:
                self.engine.abort_request([name])
                raise TimeoutError(f"the engine did not draw the probe's tokens within {self._timeout:g} s")

    @staticmethod
    def _drawn(prompt: tuple[int, ...], output: Any) -> Drawn:
        drawn = output.outputs[0]
        tokens = tuple(drawn.token_ids)
        logprobs = tuple(row[token].logprob for token, row in zip(tokens, drawn.logprobs, strict=True))
        versions = {span.version for span in drawn.weight_versions or ()}
        version = versions.pop() if len(versions) == 1 else None
        return Drawn(prompt, tokens, logprobs, output.num_cached_tokens or 0, version)
