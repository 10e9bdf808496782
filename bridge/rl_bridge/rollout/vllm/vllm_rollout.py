"""Generation by an engine of vLLM in this process."""

# pyright: reportMissingImports=false

import weakref
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase
from vllm.v1.engine.llm_engine import LLMEngine

from rl_bridge.common.files import TemporaryFolder
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines.worker import DATA_RANK, TENSOR_PARALLEL_SIZE
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.row_checks import longest_sequence
from rl_bridge.models.turn_ends import stop_tokens
from rl_bridge.rollout.sampling import StopTexts
from rl_bridge.rollout.vllm.client import InProcessEngine, draws_of
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.vllm_decoder import Outbox, VLLMDecoder
from rl_bridge.rollout.vllm.vllm_engine import close_engine, opened
from rl_bridge.rollout.vllm.weight_copies import checkpoint, require_updates
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import ProvedRollout, UpdatedEngine


class VLLMRollout(ProvedRollout):
    """The rollout worker of one device with an engine of vLLM.

    Weights that a sync brings are proved by tokens that the engine draws and the trainer scores.
    """

    # An engine that raised in the middle of a step is in an unknown state.
    engine_errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)

    def __init__(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> None:
        """Start the engine from the source's folder, or from one that is written for it and removed at the end.

        Raises:
            ValueError: options that vLLM refuses, an engine that is not what they ask for, or ``sleep`` on a CPU.
        """
        with torch.device("meta"):
            model = source.empty()
        require_updates(model)
        self._stop = stop_tokens(model, tokenizer)
        options, own = options.of_build(TENSOR_PARALLEL_SIZE.get()).of_rank(DATA_RANK.get())
        self.tensor_parallel_size = options.tensor_parallel_size
        self._tokenizer, self._options = tokenizer, options
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        options.require_sleep(self._device.type)
        self._asleep: set[str] = set()
        self._folder = TemporaryFolder("vllm")
        sent_precision = options.precision if own is None else "fp32"
        start, self._map = checkpoint(source, sent_precision, getattr(torch, options.activations), self._folder.path)
        draws = draws_of(options)
        self._client = client = InProcessEngine(
            partial(opened, options, self._device, draws, own=own), close_engine, start
        )
        self._close = weakref.finalize(self, client.close)
        self.updated = UpdatedEngine(
            client,
            start,
            tolerance=Tolerance.of(options.precision, options.proof_tolerance),
            replacements=options.replacements,
            adapter_rank=options.adapter_rank,
        )
        restart = weakref.WeakMethod(self.updated.restart)
        client.on_death = lambda: restart()()  # type: ignore[misc]  # who steps the client has its updates too
        self._outbox = Outbox(client, draws)
        self.longest = longest_sequence(model, client.limits().longest)
        self.holds_less = self.longest != longest_sequence(model)

    def decoder(self, sampling: SamplingParams) -> VLLMDecoder:
        """A decoder without rows; all decoders of a worker share its engine."""
        texts = StopTexts(self._tokenizer, sampling.stop)
        return VLLMDecoder(self._outbox, sampling, stop=self._stop, texts=texts, longest=self.longest or 0)

    def weights_device(self) -> torch.device:
        """The device that the weights are on."""
        return torch.device("cpu") if "weights" in self._asleep else self._device

    def move(self, what: str, device: torch.device) -> None:
        """Send weights to host memory, or free the keys' and values', and bring them back.

        Weights take keys and values along. On a CPU everything is in host memory already, and stays.

        Raises:
            ValueError: weights without values ("meta"), which an engine that runs cannot have: release it instead; an
                engine without sleep mode (``VLLMOptions.sleep``); or one with requests, which need keys and values.
        """
        if device.type == "meta":
            raise ValueError(f"an engine of vLLM that lives keeps its {what}: release() it, or move it to the CPU")
        if self._device.type == "cpu":
            return
        engine: LLMEngine = self._client.engine
        if device.type == self._device.type:
            if what in self._asleep:
                engine.wake_up([what])
                self._asleep.discard(what)
            return
        if not self._options.sleep:
            raise ValueError(
                f"the engine's {what} cannot leave its device: VLLMOptions(sleep=True) makes room for that"
            )
        if what == "weights" and "weights" not in self._asleep:
            engine.sleep(level=1, mode="keep")  # keep: requests that run go on afterwards
            self._asleep |= {"weights", "kv_cache"}
        elif what == "kv_cache" and not self._asleep:
            if count := self._client.running:
                raise ValueError(f"{count} requests are in the engine, whose keys and values they need: take them out")
            core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
            # Requests that have ended leave the scheduler in its next step, and batches ahead of it their queue.
            while core.scheduler.has_requests() or core.batch_queue:
                engine.step()
            core.pause_scheduler("keep", clear_cache=True)  # which waking up ends
            try:
                engine.release_kv_cache_memory()
            except BaseException:
                core.resume_scheduler()
                raise
            self._asleep.add("kv_cache")
