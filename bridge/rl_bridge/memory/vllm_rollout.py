"""The rollout of a rehearsal whose run has an engine of vLLM: the engine's memory, and what a sync fills, without vLLM.

A sync to here is the trainer's own code, from the gathering of a tensor to its copy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.results import returns
from rl_bridge.memory.live import LiveBytes
from rl_bridge.memory.places import CACHE, OFFLOADED, SERVER, TRANSFER, WEIGHTS
from rl_bridge.memory.rehearsal import Rehearsal
from rl_bridge.memory.vllm_share import EngineShare, share_of
from rl_bridge.memory.workload import Workload
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.rollouts import RolloutOptions
from rl_bridge.rollout.vllm.probe import EngineLimits, Probe
from rl_bridge.weights.manifest import Manifest, TensorSpec
from rl_bridge.weights.quantized import Quantize
from rl_bridge.weights.receiver import ModuleReceiver
from rl_bridge.weights.through import Through

_BYTE = torch.float8_e4m3fn
"""A rehearsal has no memory for numbers of this dtype, while it has for integers."""


def engine_of(pipeline: Any, source: ModelSource, workload: Any) -> EngineShare | None:
    """The engine of vLLM that a run has; None for a run without one."""
    rollout = getattr(pipeline, "rollout", None)
    if rollout is None or rollout.backend == "in_process":
        return None
    return share_for(source, rollout, workload)


def share_for(source: ModelSource, options: RolloutOptions, workload: Workload) -> EngineShare:
    """The engine of vLLM that a rollout with these options has."""
    with torch.device("meta"):
        model = source.empty()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return share_of(model, options.vllm, workload, device=device, served=options.backend == "vllm_server")


@dataclass(frozen=True)
class PlannedOptions:
    """Makes the stand-in for a rollout with vLLM, where ``Engines.rollout`` makes a rollout."""

    options: RolloutOptions
    workload: Workload
    live: LiveBytes

    def factory(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, sleep: bool) -> Any:
        """``sleep``: the engine leaves its device while others work there."""
        return partial(PlannedRollout, source, self.options, self.workload, self.live, sleep=sleep)


class PlannedRollout:
    """An engine of vLLM as far as memory goes: its weights and cache, and a sync's copies and receiver."""

    def __init__(
        self, source: ModelSource, options: RolloutOptions, workload: Workload, live: LiveBytes, *, sleep: bool
    ) -> None:
        """Reserve what the engine does when it starts, and the copy that the sync before the first step left."""
        self.share = share = share_for(source, options, workload)
        self._live, self._sleep = live, sleep
        self._through: Through = share.through
        if isinstance(live, Rehearsal) and isinstance(share.through, Quantize):
            self._through = _Sizes(share.through)
        sent = {name: TensorSpec(spec.shape, _held(spec.dtype, live)) for name, spec in share.sent.items()}
        self._adapter = options.vllm.adapter_rank is not None
        self._receiver = _Copies(sent, share.layer, live, adapter=self._adapter)
        self._weights = self._bytes(share.weights, SERVER if share.served else WEIGHTS)
        self._cache: torch.Tensor | None = self._bytes(share.cache, SERVER if share.served else CACHE)

    def awake(self, works: bool) -> None:
        """Before a phase: an engine that sleeps has its weights in host memory, and neither keys nor values."""
        if not self._sleep:
            return
        self._live.track(self._weights, WEIGHTS if works else OFFLOADED)
        if not works:
            self._cache = None
        elif self._cache is None:
            self._cache = self._bytes(self.share.cache, CACHE)

    @returns("same")
    def weights_map(self) -> Through:
        """What weights go through on their way here."""
        return self._through

    @returns("same")
    def takes_adapter(self) -> bool:
        """Whether a sync to here sends the LoRA adapter as such."""
        return self._adapter

    def weight_receiver(self) -> "_Copies":
        """What a sync to here fills."""
        return self._receiver

    def probe(self, temperature: float) -> TokenBatch:
        """The row that the trainer scores to prove an update."""
        probe = Probe.of(EngineLimits(2, self.share.longest, self.share.block), temperature)
        length = len(probe.prompt) + probe.count
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[:, -probe.count :] = True
        tokens = torch.ones(1, length, dtype=torch.int64)
        return TokenBatch(tokens, mask, torch.tensor([length]), groups=torch.zeros(1, dtype=torch.int64))

    def proved(self) -> None:
        """The copy from before goes."""
        self._receiver.prove()

    def _bytes(self, size: int, component: str) -> torch.Tensor:
        made = torch.empty(size, dtype=_BYTE)
        self._live.track(made, component)
        return made


class _Copies(ModuleReceiver):
    """The two complete copies of an update, and the layer that the engine makes a second time, as ``VLLMReceiver``."""

    def __init__(self, sent: dict[str, TensorSpec], layer: int, live: LiveBytes, *, adapter: bool) -> None:
        super().__init__(torch.nn.Module(), version=0)
        self._expected_manifest, self._layer = Manifest(sent), layer
        self._takes_adapter = adapter
        self._arriving: dict[str, torch.Tensor] = {}
        # Of an adapter nothing is known before the first sync.
        self._proved = {} if adapter else _empties(sent)
        for copy in self._proved.values():
            live.track(copy, TRANSFER)

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Names, shapes and dtypes."""
        for name, spec in self._expected_manifest.tensors.items():
            yield name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def adapter_config(self) -> dict[str, Any]:
        """That of ``expect_adapter``."""
        assert self._expected_manifest.adapter is not None, "expect_adapter comes first"
        return self._expected_manifest.adapter

    def expect_adapter(self, sent: Manifest) -> None:
        """Whatever comes is taken."""
        self._expected_manifest = sent

    def begin(self, manifest: Manifest) -> None:
        """Make room beside the copy that is proved."""
        self.version, self._seen = None, set()
        self._arriving = _empties(manifest.tensors)
        self._targets = dict(self._arriving)

    def finish(self) -> None:
        """The engine reads the copy, layer by layer."""
        super().finish()
        if not self._takes_adapter:
            torch.empty(self._layer, dtype=_BYTE)

    def prove(self) -> None:
        """The newest copy is the one to go back to."""
        self._proved, self._arriving = self._arriving, {}


@dataclass(frozen=True)
class _Sizes:
    """The map of an update without its values: a code takes a byte and is not computed."""

    through: Quantize

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        rounded = tensor.to(self.through.dtype) if tensor.is_floating_point() else tensor
        if name not in self.through.names:
            yield name, rounded
            return
        for made, outline in self.through(name, torch.empty_like(tensor, device="meta")):
            dtype = outline.dtype if outline.dtype.is_floating_point else _BYTE
            yield made, torch.empty(outline.shape, dtype=dtype, device=tensor.device)


def _held(dtype: torch.dtype, live: LiveBytes) -> torch.dtype:
    return _BYTE if isinstance(live, Rehearsal) and dtype == torch.int8 else dtype


def _empties(specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
