"""Generation by an engine in a process of its own, or on another machine, that is asked over HTTP."""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.common.files import TemporaryFolder
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines.worker import DATA_RANK, TENSOR_PARALLEL_SIZE
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.row_checks import longest_sequence
from rl_bridge.models.turn_ends import stop_tokens
from rl_bridge.rollout.sampling import StopTexts
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import EngineServer
from rl_bridge.rollout.served.served_engine import ServedDecoder, ServedEngine
from rl_bridge.rollout.served.sglang import SGLangOptions, SGLangServer, require_one_order
from rl_bridge.rollout.served.vllm_server import ServedOptions, VLLMServer
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.request_fields import require_temperature
from rl_bridge.rollout.vllm.weight_copies import checkpoint, require_updates
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import REPLACEMENTS, ProvedRollout, UpdatedEngine
from rl_bridge.weights.source import Precision


class _Served(ProvedRollout):
    """A worker whose engine is a server.

    A server that dies is started again, or waited for, with the weights it had, and gets its requests again. A sync
    ends in a proved update or in a server that was given the weights anew.
    """

    # A server was started again and again, in vain: an asynchronous run gets its rows back and asks for another server.
    engine_errors: ClassVar[tuple[type[Exception], ...]] = (ServerDied,)

    def _connect(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        open_server: Callable[[Path], EngineServer],
        *,
        dtype: torch.dtype,
        precision: Precision,
        tolerance: Tolerance | None = None,
        at_once: int,
        restarts: int,
        replacements: int = REPLACEMENTS,
        adapter_rank: int | None = None,
    ) -> None:
        with torch.device("meta"):
            model = source.empty()
        require_updates(model)
        self._stop = stop_tokens(model, tokenizer)
        self._tokenizer = tokenizer
        self._folder = TemporaryFolder("served")
        folder, self._map = checkpoint(source, precision, dtype, self._folder.path)
        self.engine = ServedEngine(open_server, folder, at_once=at_once, restarts=restarts)
        self._close = weakref.finalize(self, self.engine.close)
        self.longest = longest_sequence(model, self.engine.limits().longest)
        self.holds_less = self.longest != longest_sequence(model)
        tolerance = tolerance or Tolerance.of(precision)
        self.updated = UpdatedEngine(
            self.engine, folder, tolerance=tolerance, replacements=replacements, adapter_rank=adapter_rank
        )

    def decoder(self, sampling: SamplingParams) -> ServedDecoder:
        """A decoder without rows; all decoders of a worker share its engine."""
        texts = StopTexts(self._tokenizer, sampling.stop)
        return ServedDecoder(self.engine, sampling, stop=self._stop, texts=texts, longest=self.longest)

    def weights_device(self) -> torch.device:
        """The CPU: this process has none of the weights."""
        return torch.device("cpu")

    def move(self, what: str, device: torch.device) -> None:
        """Do nothing: the server keeps its memory, so a device that others need is not for a server.

        Raises:
            ValueError: weights that are to be freed.
        """
        if device.type == "meta":
            raise ValueError(f"a server keeps its {what} until it is closed")


class ServedRollout(_Served):
    """The rollout worker of one server process of vLLM."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        options: VLLMOptions | None = None,
        served: ServedOptions | None = None,
    ) -> None:
        """Start the server from the source's folder, or from one that is written for it and removed at the end.

        Raises:
            ValueError: options that a server does not have.
            ServerDied: it ended, with the end of its log.
            TimeoutError: it did not reply in time.
        """
        served = served or ServedOptions()
        options, own = (options or VLLMOptions()).of_build(TENSOR_PARALLEL_SIZE.get()).of_rank(DATA_RANK.get())
        self.tensor_parallel_size = options.tensor_parallel_size
        self._connect(
            source,
            tokenizer,
            partial(VLLMServer, options=options, served=served, own=own),
            dtype=getattr(torch, options.activations),
            precision=options.precision if own is None else "fp32",
            tolerance=Tolerance.of(options.precision, options.proof_tolerance),
            at_once=options.max_num_seqs,
            restarts=served.restarts,
            replacements=options.replacements,
            adapter_rank=options.adapter_rank,
        )

    def decoder(self, sampling: SamplingParams) -> ServedDecoder:
        """A decoder without rows, as of any server.

        Raises:
            ValueError: a temperature that vLLM does not have.
        """
        require_temperature(sampling)
        return super().decoder(sampling)


class SGLangRollout(_Served):
    """The rollout worker of a server of SGLang that somebody else has started, with these weights or others."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        options: SGLangOptions,
        *,
        dtype: torch.dtype = torch.bfloat16,
        at_once: int = 256,
        restarts: int = 3,
    ) -> None:
        """Give the server the source's weights, from a folder that the server must see.

        Args:
            source: the model.
            tokenizer: its tokenizer.
            options: where the server is.
            dtype: that the server computes in.
            at_once: requests that the server gets at a time; others wait here.
            restarts: times that the server may vanish without a completion in between.

        Raises:
            TimeoutError: it did not reply in time.
        """
        self._connect(
            source,
            tokenizer,
            partial(SGLangServer, options),
            dtype=dtype,
            precision="fp32" if dtype == torch.float32 else "bf16",
            at_once=at_once,
            restarts=restarts,
        )

    def decoder(self, sampling: SamplingParams) -> ServedDecoder:
        """A decoder without rows, as of any server.

        Raises:
            ValueError: truncations that SGLang may take in another order.
        """
        require_one_order(sampling)
        return super().decoder(sampling)
