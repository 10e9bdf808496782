"""An export before training: the untrained model's files are written, read back and compared, without its numbers."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from rl_bridge.models.conversion import ConvertedTensors, written_tensors
from rl_bridge.models.exported_files import ExportTypes, written_source
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.own_model import OwnModel
from rl_bridge.models.pretrained import write_model
from rl_bridge.models.stored_tensors import TensorsInHand, require_fit
from rl_bridge.models.tokenizer_files import probe, tokenizer_in, write_tokenizer
from rl_bridge.weights.manifest import module_tensors

_OF_WRITING = (
    "_name_or_path",
    "auto_map",
    "transformers_weights",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
)
"""Fields of a configuration that tell of the file and not of the model."""


def rehearse_export(source: ModelSource, tokenizer: PreTrainedTokenizerBase, types: ExportTypes) -> None:
    """Write the files of the untrained model as an export writes them, read them back and compare.

    Configuration, settings of generation and tokenizer are written into a temporary folder. Of the weights the names
    and shapes are made, and fitted to the model again; their numbers take neither memory nor time.

    Raises:
        ValueError: something that cannot be written, or is read back as something else: after the training it would
            be too late.
    """
    with torch.device("meta"):
        model = written_source(source).empty()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            with _without_bars():
                write_model(model, {}, folder, types.dtype)
            write_tokenizer(tokenizer, folder)
            faults = [*_faults_of_model(model, folder, types), *_faults_of_tokenizer(tokenizer, folder)]
        except Exception as error:  # of any kind, by what transformers does not write or read
            raise ValueError(f"{_REFUSAL}: {str(error).replace(place, 'its folder')}") from error
    if faults:
        raise ValueError(f"{_REFUSAL}: {'; '.join(faults)}")


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bar of a file of weights, of which a rehearsal writes none."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


_REFUSAL = "the trained model could not be exported, as its untrained files show"


def _faults_of_model(model: PreTrainedModel, folder: Path, types: ExportTypes) -> Iterator[str]:
    if isinstance(model, OwnModel):
        return  # a file of tensors under the class's own names, which the source has compared
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # A whole model's configuration has parts that the language model alone has not: Moshi's depth decoder.
    parts = {type(module.config) for module in model.modules() if hasattr(module, "config")}
    absent = {name for name in model.config.sub_configs if type(getattr(model.config, name, None)) not in parts}
    written, read = (
        {name: value for name, value in _fields(one).items() if name not in absent} for one in (model.config, config)
    )
    yield from _differences("config.json", written, read)
    if config.dtype != types.dtype:
        yield f"config.json says {config.dtype}, and the weights are {types.dtype}"
    if model.can_generate() and model.generation_config is not None:
        generation = GenerationConfig.from_pretrained(folder)
        yield from _differences("generation_config.json", _fields(model.generation_config), _fields(generation))
    try:
        with torch.device("meta"):
            again = type(model)(config)
        written = _Written(written_tensors(model, dict(module_tensors(model))))
        require_fit(again, ConvertedTensors(written, again))  # type: ignore[arg-type]
    except ValueError as error:
        yield f"its weights would not be read again: {error}"


class _Written(TensorsInHand):
    """Tensors as a file would have them, without numbers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.dtypes = {name: "F32" if tensor.is_floating_point() else "I64" for name, tensor in tensors.items()}


def _fields(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string(use_diff=False))
    if isinstance(rotary := fields.get("rope_parameters"), dict):
        rotary.pop("type", None)  # an older name of rope_type, which is there too
        if "partial_rotary_factor" in rotary:
            fields.pop("partial_rotary_factor", None)  # for transformers 4 alone
    return _of_model(fields)


def _of_model(value: Any) -> Any:
    """The value without what tells of the file, in a configuration inside the configuration too."""
    if isinstance(value, dict):
        return {name: _of_model(inner) for name, inner in value.items() if name not in _OF_WRITING}
    return value


def _differences(what: str, expected: dict[str, Any], read: dict[str, Any]) -> Iterator[str]:
    for name in sorted(expected.keys() | read.keys()):
        if expected.get(name) != read.get(name):
            yield f"{what} is read back with {name} {read.get(name)!r}, which is {expected.get(name)!r}"


def _faults_of_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    read = tokenizer_in(str(folder), alone=True, say=lambda text: None)
    for what in ("special_tokens_map", "extra_special_tokens"):
        if getattr(read, what) != getattr(tokenizer, what):
            yield f"the tokenizer's {what} is read back as {getattr(read, what)!r}, not {getattr(tokenizer, what)!r}"
    expected, templates = _templates(tokenizer), _templates(read)
    for name in sorted(expected.keys() | templates.keys()):
        pair = templates.get(name, ""), expected.get(name, "")
        if pair[0] != pair[1]:
            ends = (text + mark for text, mark in zip(pair, "\0\1", strict=True))
            start = max(0, next(i for i, (a, b) in enumerate(zip(*ends, strict=False)) if a != b) - 20)
            texts = [f"{text[start : start + 40]!r}…" for text in pair]
            place = f"from character {start} on"
            yield f"the tokenizer's chat template {name!r} is read back with {texts[0]} {place}, not {texts[1]}"
    if read.get_vocab() != tokenizer.get_vocab():
        yield f"the tokenizer is read back with {len(read)} tokens, which has {len(tokenizer)}, or with other ids"
    elif (ids := read(text := probe(tokenizer)).input_ids) != (expected := tokenizer(text).input_ids):
        yield f"the tokenizer is read back with other ids: {ids[:8]}… for {expected[:8]}…"


def _templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Name → chat template, with lines that end as a file that is read has them, and as Jinja does."""
    templates: Any = tokenizer.chat_template or {}
    templates = {"default": templates} if isinstance(templates, str) else templates
    return {name: text.replace("\r\n", "\n").replace("\r", "\n") for name, text in templates.items()}
