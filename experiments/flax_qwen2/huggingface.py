"""Hugging Face folders, both ways: ``config.json`` and ``model.safetensors`` to an nnx module and back."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from safetensors.flax import load_file, save_file

from experiments.flax_qwen2.config import Qwen2Config
from experiments.flax_qwen2.decoder import Qwen2
from rl_bridge.common.files import replacing

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "generation_config.json")
LEAF_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def _name(path: tuple) -> str:
    *modules, leaf = (str(part) for part in path)
    root = () if modules[0] == "lm_head" else ("model",)
    return ".".join((*root, *modules, LEAF_NAMES[leaf]))


def _transposed(path: tuple) -> bool:
    """A flax kernel is ``[in, out]``, a torch weight ``[out, in]``."""
    return path[-1] == "kernel"


def _read_tensors(folder: Path) -> dict[str, Array]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Array] = {}
    for name in names:
        tensors |= load_file(folder / name)
    return tensors


def load_pretrained(folder: str | os.PathLike) -> Qwen2:
    """The decoder of a Hugging Face folder, in float32. An unknown, missing or misshapen tensor is an error."""
    folder = Path(folder)
    config = Qwen2Config.from_huggingface(json.loads((folder / "config.json").read_text()))
    tensors = _read_tensors(folder)
    if config.tie_word_embeddings:
        # Some writers store the tied head twice.
        tensors.pop("lm_head.weight", None)
    model = nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0)))
    graph, parameters = nnx.split(model, nnx.Param)
    wanted = {_name(path): (path, variable) for path, variable in nnx.to_flat_state(parameters)}
    if set(wanted) != set(tensors):
        missing, unknown = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        raise ValueError(f"{folder}: tensors missing {missing}, unknown {unknown}")
    loaded = []
    for name, (path, variable) in wanted.items():
        value = tensors[name].astype(jnp.float32)
        value = value.T if _transposed(path) else value
        if value.shape != variable.shape:
            raise ValueError(f"{folder}: {name} has shape {tensors[name].shape}, config.json asks for {variable.shape}")
        loaded.append((path, variable.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def save_pretrained(model: Qwen2, folder: str | os.PathLike, *, like: str | os.PathLike | None = None) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads; it appears whole or not at all.

    ``like`` is the folder that the model came from: its configuration and tokenizer files go along unchanged.
    """
    config = model.config.to_huggingface()
    extra: list[Path] = []
    if like is not None:
        config = json.loads((Path(like) / "config.json").read_text()) | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        extra = [file for pattern in TOKENIZER_FILES for file in Path(like).glob(pattern)]
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = jax.device_get(variable[...])
        tensors[_name(path)] = jnp.asarray(value.T if _transposed(path) else value)
    with replacing(Path(folder)) as temporary:
        temporary.mkdir()
        for file in extra:
            shutil.copy(file, temporary / file.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
