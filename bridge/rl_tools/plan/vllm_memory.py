"""The memory of an engine of vLLM and of the syncs to it, from the model's structure and the options, without vLLM.

Counted are the tensors that vLLM 0.32 makes: weights in their precision, a table of rotary embeddings, room for an
adapter, blocks of keys and values. CUDA graphs, activations and workspaces of its kernels come on top.

A sync to here is the trainer's own code, from the gathering of a tensor to its copy.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.dispatch import returns
from rl_bridge.models.model_source import ModelSource
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.weight_probe import EngineLimits, Probe
from rl_bridge.weights.manifest import Manifest, TensorSpec, described, module_tensors
from rl_bridge.weights.receiver import ModuleReceiver
from rl_bridge.weights.source import Quantize, Through, precision_map
from rl_tools.plan.rehearsal import Rehearsal
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import CACHE, OFFLOADED, SERVER, TRANSFER, WEIGHTS, LiveBytes
from rl_tools.profile.timeline import shown_bytes

# The bytes, from the model's structure and the options.

PADDING = 64
"""vLLM's vocabularies are multiples of as many tokens."""
_BLOCK = {"cpu": 128, "cuda": 16}
"""Tokens of a block of keys and values, unless ``block_size`` says otherwise."""
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Layers of a checkpoint that are one layer of vLLM."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM makes room."""


@dataclass(frozen=True)
class EngineShare:
    """Bytes of one engine, and how many of a step's requests its cache holds."""

    weights: int
    """With the scales of codes, the padding of the vocabulary, the rotary table and the room for an adapter."""
    layer: int
    """The largest of vLLM's layers, which an update makes a second time before its values replace the old ones."""
    cache: int
    """Bytes of keys and values, reserved when the engine starts."""
    needed: int
    """Bytes of keys and values, for all requests of a step at their full length and none with a prompt in common."""
    reserved: bool
    """Whether options say how large the cache is. If not, vLLM takes what it finds left, and ``cache`` is ``needed``:
    less than that."""
    held: int
    """Requests of full length that the cache has room for."""
    at_once: int
    """Requests that run together at full length; others wait, or give up their blocks and are read again."""
    requests: int
    """Requests of a step."""
    block: int
    """Tokens of a block of the cache."""
    block_bytes: int
    """Bytes of a block, all layers together."""
    longest: int
    """Tokens of the longest sequence that the engine takes."""
    served: bool
    """Whether the engine is a server's, in a process of its own."""
    sent: dict[str, TensorSpec]
    """Tensors that an update sends, by name."""
    through: Through
    """The map that an update goes through."""

    def numbers(self) -> dict[str, int | bool]:
        """All but the tensors, for JSON."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def lines(self) -> list[str]:
        """Lines below a plan: the meaning of the options for a step."""
        cache, needed = shown_bytes(self.cache), shown_bytes(self.needed)
        lines = [f"vLLM's cache of {cache} holds all {self.requests} requests of a step, which need {needed}"]
        if not self.reserved:
            lines = [
                f"vLLM takes what it finds left on the device for keys and values; {needed} of that, which "
                f"{self.requests} requests need, is counted"
            ]
        elif self.at_once < self.requests:
            limit = "kv-cache-gib" if self.held == self.at_once else "max-num-seqs"
            lines = [
                f"vLLM's cache of {cache} holds {self.held} requests at once; of the step's {self.requests}, which "
                f"need {needed}, {self.at_once} run together and others wait (--rollout.vllm.{limit})"
            ]
        if self.served:
            lines.append("server: vLLM's process beside the worker, with weights, keys and values; no meter sees it")
        return lines


def share_of(
    model: PreTrainedModel, options: VLLMOptions, workload: Workload, *, device: str, served: bool = False
) -> EngineShare:
    """The share of a ``device``, "cpu" or "cuda", that an engine takes; ``model`` may lie on the meta device.

    Raises:
        ValueError: an option of vLLM whose bytes are not known here, or a cache without room for one request.
    """
    if options.tensor_parallel_size != 1:
        raise ValueError(f"the bytes of an engine cut over {options.tensor_parallel_size} ranks are not known here")
    options, precision = options.of_rank(0)
    dtype: torch.dtype = getattr(torch, options.activations)
    resident = _through(options.precision, model, dtype)
    padding = _padding(model) * dtype.itemsize
    layers = Counter(dict.fromkeys(_vocabularies(model), padding))
    for name, spec in resident.items():
        layers[_layer(name)] += spec.nbytes
    weights = sum(layers.values()) + _rotary_table(model) * dtype.itemsize
    if options.adapter_rank is not None:
        weights += _adapter_room(model, options.adapter_rank) * dtype.itemsize
    config, plain = model.config.get_text_config(), precision is not None
    cache = _cache(config, options, dtype, workload, device)
    return EngineShare(
        weights=weights,
        layer=max(layers.values()),
        **cache,
        requests=workload.rows,
        served=served,
        longest=options.max_model_len or config.max_position_embeddings,
        sent=_through("fp32", model, dtype) if plain else resident,
        through=precision_map("fp32" if plain else options.precision, model, dtype=dtype),
    )


def _through(precision: Any, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a checkpoint in this precision."""
    send = precision_map(precision, model, dtype=dtype)
    pairs = (pair for name, t in module_tensors(model) for pair in send(name, torch.empty_like(t, device="meta")))
    return described(pairs, type(model).__name__)


def _layer(name: str) -> str:
    """vLLM's layer of a tensor: queries, keys and values are one, and so are gate and up.

    >>> _layer("model.layers.0.self_attn.k_proj.weight"), _layer("model.norm.weight")
    ('model.layers.0.self_attn.qkv', 'model.norm')
    """
    parent, _, leaf = name.rpartition(".")[0].rpartition(".")
    return f"{parent}.{_FUSED.get(leaf, leaf)}"


def _vocabularies(model: PreTrainedModel) -> list[str]:
    """Layers of embeddings, and of a head that has weights of its own."""
    names_by_tensor = {id(tensor): name for name, tensor in model.named_parameters()}
    heads: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [
        names_by_tensor[id(head.weight)] for head in heads if head is not None and id(head.weight) in names_by_tensor
    ]
    return sorted({_layer(name) for name in names})


def _padding(model: PreTrainedModel) -> int:
    """Numbers that one vocabulary has more than in the checkpoint."""
    embeddings: Any = model.get_input_embeddings()
    rows, columns = embeddings.weight.shape
    return -rows % PADDING * columns


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_table(model: PreTrainedModel) -> int:
    """Numbers of the cosines and sines of all positions, which the layers share."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if not rope and getattr(config, "rope_theta", None) is None:
        return 0
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    return config.max_position_embeddings * int(_head_size(config) * part)


def _adapter_room(model: PreTrainedModel, rank: int) -> int:
    """Numbers of the two matrices beside each linear layer but the head."""
    if rank > max(_RANKS):
        raise ValueError(f"vLLM takes adapters of rank {max(_RANKS)} at most, got adapter_rank={rank}")
    rank = min(room for room in _RANKS if room >= rank)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)


def _cache(config: Any, options: VLLMOptions, dtype: torch.dtype, load: Workload, device: str) -> dict[str, Any]:
    arguments = options.engine_arguments()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    block = arguments.get("block_size") or _BLOCK[device]
    block_bytes = block * 2 * heads * _head_size(config) * config.num_hidden_layers * dtype.itemsize
    # The keys and values of the last token that is drawn are never computed.
    longest = min(load.row_tokens, options.max_model_len or load.row_tokens) - 1
    request_blocks = -(-longest // block)
    needed = load.rows * request_blocks * block_bytes
    sizes = {"cache": needed, "needed": needed, "block": block, "block_bytes": block_bytes, "reserved": False}
    room = _reserved(options, arguments, device)
    if room is None:
        return {**sizes, "held": load.rows, "at_once": min(load.rows, options.max_num_seqs)}
    blocks = room // block_bytes
    requests = (blocks - 1) // request_blocks  # vLLM keeps the first block for itself
    if requests < 1:
        raise ValueError(
            f"vLLM's cache of {shown_bytes(room)} has {max(blocks - 1, 0)} blocks of {block} tokens, and one request "
            f"of {longest} tokens needs {request_blocks}: --rollout.vllm.kv-cache-gib"
        )
    at_once = min(requests, options.max_num_seqs, load.rows)
    return {**sizes, "cache": blocks * block_bytes, "reserved": True, "held": requests, "at_once": at_once}


def _reserved(options: VLLMOptions, arguments: dict[str, Any], device: str) -> int | None:
    """Bytes that options or the environment name."""
    if arguments.get("kv_cache_memory_bytes") is not None:
        return int(arguments["kv_cache_memory_bytes"])
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * 2**30)
    named = os.environ.get("VLLM_CPU_KVCACHE_SPACE") if device == "cpu" else None
    return int(named) * 2**30 if named else None


# The rollout of a rehearsal whose run has an engine of vLLM: the engine's memory, and what a sync fills, without vLLM.

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
        specs = {name: TensorSpec(spec.shape, _dtype_in(spec.dtype, live)) for name, spec in share.sent.items()}
        self._adapter = options.vllm.adapter_rank is not None
        self._receiver = _Copies(specs, share.layer, live, adapter=self._adapter)
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
        """The map that weights go through on their way here."""
        return self._through

    @returns("same")
    def takes_adapter(self) -> bool:
        """Whether a sync to here sends the LoRA adapter as such."""
        return self._adapter

    def weight_receiver(self) -> "_Copies":
        """The receiver of a sync to here."""
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
        buffer = torch.empty(size, dtype=_BYTE)
        self._live.track(buffer, component)
        return buffer


class _Copies(ModuleReceiver):
    """The two complete copies of an update, and the layer that the engine makes a second time, as ``VLLMReceiver``."""

    def __init__(self, specs: dict[str, TensorSpec], layer: int, live: LiveBytes, *, adapter: bool) -> None:
        super().__init__(torch.nn.Module(), version=0)
        self._expected_manifest, self._layer = Manifest(specs), layer
        self._takes_adapter = adapter
        self._arriving: dict[str, torch.Tensor] = {}
        # Of an adapter nothing is known before the first sync.
        self._proved = {} if adapter else _empties(specs)
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
        for part, outline in self.through(name, torch.empty_like(tensor, device="meta")):
            dtype = outline.dtype if outline.dtype.is_floating_point else _BYTE
            yield part, torch.empty(outline.shape, dtype=dtype, device=tensor.device)


def _dtype_in(dtype: torch.dtype, live: LiveBytes) -> torch.dtype:
    return _BYTE if isinstance(live, Rehearsal) and dtype == torch.int8 else dtype


def _empties(specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
