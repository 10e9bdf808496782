"""Checkpoints in the format of compressed-tensors, written tensor by tensor from any source of a model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from rl_bridge.models.exported_files import with_older_names, write_generation_config
from rl_bridge.models.model_source import ModelSource, PretrainedSource
from rl_bridge.models.stored_tensors import INDEX, ONE_FILE, require_fit
from rl_bridge.weights.manifest import module_tensors
from rl_bridge.weights.source import BLOCK, LAYOUTS, Precision, Quantize, Through, precision_map

SHARD_BYTES = 2 << 30


def quantization_config(precision: str, model: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    """The entry of ``config.json`` for a checkpoint in which the weights ``names`` are codes.

    Activations are quantised anew for each token: nothing of them is calibrated, so nothing of them goes stale.
    """
    layout = LAYOUTS[precision]
    kind = "int" if layout.scheme == "int8" else "float"
    codes = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**codes, "strategy": layout.granularity, "dynamic": False}
    tokens: dict[str, Any] = {**codes, "strategy": "token", "dynamic": True}
    if layout.granularity == "tensor":
        tokens["strategy"] = "tensor"
    elif layout.granularity == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        tokens |= {"strategy": "group", "group_size": BLOCK}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": [name for name in linear if f"{name}.weight" not in names],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": tokens}},
    }


def write_checkpoint(
    source: ModelSource,
    folder: Path,
    precision: Precision,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
) -> Through:
    """Write a model in this precision, as an engine starts from it; returns the map that its updates go through.

    At most ``shard_bytes`` of it are in memory at once, and the largest tensor, where the source is a folder or hub id;
    other sources make the whole model.

    Args:
        source: of the weights.
        folder: is made; files in it are replaced.
        precision: of the linear layers but the head.
        dtype: of everything else.
        shard_bytes: of one file.

    Raises:
        ValueError: a weight that cannot be quantised, by its name; no linear layers.
    """
    with torch.device("meta"):
        model = source.empty()
    send = precision_map(precision, model, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, send, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [ONE_FILE]
    else:
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(sum(shard.values()) for shard in shards)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    stream = (named_tensor for name, tensor in tensors_of(source, model) for named_tensor in send(name, tensor))
    for file, shard in zip(names, shards, strict=True):
        save_file({n: t.contiguous() for n, t in _take(stream, shard)}, folder / file, metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    if isinstance(send, Quantize):
        config["quantization_config"] = quantization_config(precision, model, send.names)
    (folder / "config.json").write_text(json.dumps(with_older_names(config), indent=2))
    if model.generation_config is not None:
        write_generation_config(model.generation_config, folder)
    return send


def tensors_of(source: ModelSource, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a source under the model's names, tied ones once; ``model`` is its ``empty()``, without values."""
    if isinstance(source, PretrainedSource):
        stored = source.stored()
        for target, names in require_fit(model, stored).items():
            present = next(name for name in names if name in stored.shapes)
            yield names[0], stored.read(present, (slice(None),) * target.dim())
    else:
        source.load(model)
        yield from module_tensors(model)


def _shards(model: nn.Module, send: Through, shard_bytes: int) -> list[dict[str, int]]:
    """Names and bytes of each file, in the order of the stream; what one tensor becomes stays together."""
    shards: list[dict[str, int]] = [{}]
    for name, tensor in module_tensors(model):
        sizes = {n: t.nbytes for n, t in send(name, torch.empty_like(tensor, device="meta"))}
        if shards[-1] and sum(shards[-1].values()) + sum(sizes.values()) > shard_bytes:
            shards.append({})
        shards[-1] |= sizes
    return shards


def _take(stream: Iterator[tuple[str, torch.Tensor]], shard: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file."""
    for expected in shard:
        name, tensor = next(stream)
        assert name == expected, f"{name} came in the place of {expected}"
        yield name, tensor.detach()
