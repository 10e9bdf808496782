"""The folder that an engine of vLLM starts from: the source's own, or one that is written for it."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from rl_bridge.models.source import ModelSource, PretrainedSource
from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.weights.compressed_tensors import write_checkpoint
from rl_bridge.weights.quantized import LAYOUTS, Precision
from rl_bridge.weights.through import Cast, Through

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_NOT_UPDATED = {
    "gpt_oss": "sinks and experts are copied past the loaders that its reload waits for, and stay as they were",
    "cohere2": "a token of its sliding layers sees one token more there than in transformers",
    "lfm2": "it reads conv_dim of the configuration, which transformers 5.19 does not write",
}
"""Families that vLLM 0.32 draws, and whose weights it does not take twice or does not compute with as we do."""
_EXPERTS = "its loader does not take a mixture's experts in place, and a fresh engine for each update is none"


def require_updates(model: PreTrainedModel) -> None:
    """Refuse a model whose updates vLLM loses, or that is another model there: before an engine is opened for it.

    Raises:
        NotImplementedError: with the reason and the way on.
    """
    reason = _NOT_UPDATED.get(model.config.get_text_config().model_type)
    if reason is None and any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters()):
        reason = _EXPERTS
    if reason is not None:
        raise NotImplementedError(
            f"vLLM draws no rollouts of {type(model).__name__}: {reason}; such a model needs backend in_process"
        )


def checkpoint(source: ModelSource, precision: Precision, dtype: torch.dtype, into: Path) -> tuple[Path, Through]:
    """A folder with the source's weights in this precision, others as ``dtype``, and the map of its updates.

    An update has the names, shapes and dtypes of the checkpoint that the engine started from. So a model that is stored
    otherwise, as a mixture whose experts are files' tensors one by one, is written into ``into``, which needs room.
    """
    if isinstance(source, PretrainedSource) and precision not in LAYOUTS:
        folder = source.folder()
        stored = SafetensorsFolder.of_folder(folder)
        with torch.device("meta"):
            names = source.empty().state_dict().keys()
        if set(stored.dtypes.values()) == {_STORED[dtype]} and stored.shapes.keys() <= names:
            return folder, Cast(dtype)
    return into, write_checkpoint(source, into, precision, dtype=dtype)
