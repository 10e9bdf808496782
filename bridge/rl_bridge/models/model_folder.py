"""A model's folder or hub id as transformers reads it, never with its code, and which kinds can be trained."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from rl_bridge.common.files import MODEL_SUFFIXES

# Which models can be trained: causal language models whose weights are numbers, not codes.

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that can be trained, in the words of safetensors."""


def require_causal(config: Any, name: str) -> None:
    """Refuse a model that does not predict the next token, or whose weights are quantised.

    Raises:
        ValueError: with the kind of the model and what to do.
    """
    kind = config.model_type
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised.quant_method
        raise ValueError(
            f"the weights of {name!r} are quantised ({method}), and quantised weights cannot be trained: "
            "take the model that they were made from"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{name!r} is a {kind!r}, of which transformers has no causal language model")
    if config.is_encoder_decoder:
        raise ValueError(f"{name!r} is a {kind!r} with an encoder and a decoder, and no causal language model")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"{name!r} is a {kind!r} whose tokens attend to later ones (config.is_decoder is False): "
            "no causal language model"
        )


def require_floats(dtypes: Mapping[str, str], name: str) -> None:
    """Refuse stored tensors that are whole numbers: codes of quantised weights, whatever the configuration says.

    Raises:
        ValueError: with the first of them.
    """
    coded = sorted(tensor for tensor, dtype in dtypes.items() if dtype not in FLOATS)
    if coded:
        raise ValueError(
            f"{len(coded)} weights of {name!r} are quantised or whole numbers, which cannot be trained; the first is "
            f"{coded[0]!r} of type {dtypes[coded[0]]}: take the model that they were made from"
        )


# Reading the folder or hub id, with errors that name it.

Made = TypeVar("Made")
CONFIG, TOKENIZER, TEMPLATE = "config.json", "tokenizer.json", "chat_template.jinja"
ADAPTER = "adapter_config.json"
SHOWN = 5
"""Models of runs that an error names."""
OWN = "own_model.json"
"""Written beside the weights of a class of the user's own, in place of a config."""
OBJECTS = (CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")
"""Files that hold a JSON object, those that are there."""
COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields of a config that nearly all families have."""


def folder_of(name: str, patterns: Sequence[str] = tuple(f"*{end}" for end in MODEL_SUFFIXES)) -> Path:
    """Where the files are; those of a hub id that match are downloaded first, if they are not here already.

    Raises:
        ValueError: no such folder and no such model on the hub, a file, or the folder of a run instead of its model.
    """
    path = require_place(name)
    if path.is_dir():
        return path
    what = f"there is no folder {name!r} here, and it cannot be had from the hub: "
    folder = made(name, lambda: Path(snapshot_download(name, allow_patterns=list(patterns))), what)
    if (reason := _adapter(folder)) is not None:
        raise ValueError(f"no model can be loaded from {name!r}: {reason}")
    return folder


def require_place(name: str, *, model: bool = True) -> Path:
    """The path of ``name``, which may be a hub id instead. Raises ValueError for what can be neither.

    ``model``: whether a model is looked for; a tokenizer alone lies in a folder without a config.
    """
    path = Path(name)
    reason = _why_not(name, path, model)
    if reason is not None:
        raise ValueError(f"no model can be loaded from {name!r}: {reason}")
    return path


def _why_not(name: str, path: Path, model: bool) -> str | None:
    if re.fullmatch(r".+\.py:\w+", name):
        return (
            "it is a class of your own, which load_model and a run's --model take: critics, teachers, judges and tools "
            "take folders"
        )
    if not name.strip():
        return f"the name is empty; a model is a folder with {CONFIG}, safetensors and a tokenizer, or a hub id"
    if path.is_file():
        return f"it is a file; a model is a folder with {CONFIG}, safetensors and a tokenizer"
    if path.is_dir():
        if _is_run(path):
            return f"it is the folder of a run, and {_export_of(path)}"
        if model and (reason := _adapter(path)) is not None:
            return reason
        if model and not (path / CONFIG).exists():
            return _without_config(path)
        files = [path / file for file in (*OBJECTS, TEMPLATE) if (path / file).exists()]
        return next(filter(None, (_unreadable(file, file.stat().st_mtime_ns) for file in files)), None)
    # A hub id is NAME or OWNER/NAME; anything else, and what lies in a folder that is here, was meant as a path.
    parts = name.split("/")
    is_path = (
        len(parts) > 2 or not all(parts) or name.startswith((".", "~")) or (len(parts) == 2 and path.parent.is_dir())
    )
    return "there is no such folder" if is_path else None


def _adapter(folder: Path) -> str | None:
    """Why a folder with an adapter of peft's is no model, whether or not weights lie beside the adapter."""
    if not (folder / ADAPTER).is_file():
        return None
    try:
        about = json.loads((folder / ADAPTER).read_text("utf-8"))
        kind, base = str(about.get("peft_type", "LoRA")), about.get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        kind, base = "LoRA", None
    return (
        f"its {ADAPTER} says that it is a {'LoRA' if kind == 'LORA' else kind} adapter of "
        f"{base or 'a model that is not named'}, which is not applied here. Merge the adapter: "
        "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(MERGED), with the "
        f"tokenizer beside it; or take {ADAPTER} out of the folder to train its weights without the adapter"
    )


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _export_of(run: Path) -> str:
    return f"its model is {run / 'model'}" if (run / "model").is_dir() else "has no model yet"


def _without_config(folder: Path) -> str:
    if not (folder / OWN).is_file():
        place = folder.resolve()
        if (run := next(filter(_is_run, place.parents), None)) is not None and place != run / "model":
            return f"it is a folder in the run {run}, and {_export_of(run)}"
        if runs := sorted(inside for inside in folder.iterdir() if _is_run(inside)):
            models = [str(run / "model") for run in runs if (run / "model").is_dir()]
            listed = ", ".join(models[:SHOWN]) + (f" and {len(models) - SHOWN} more" if len(models) > SHOWN else "")
            return f"it is a folder of runs; their models are {listed or 'not there yet'}"
        return f"the folder has no {CONFIG}"
    about = json.loads((folder / OWN).read_text("utf-8"))
    return (
        f"it holds weights of a class of your own, {about['class']}, without which nothing reads them: load_model("
        f"{about['class']}, tokenizer=…, weights=…), or --model FILE.py:{about['class']} --tokenizer … --weights …"
    )


@lru_cache(maxsize=256)
def _unreadable(file: Path, changed: int) -> str | None:
    """Why a file is none that transformers reads; ``changed`` is when it was written. It says so without the name."""
    if not file.is_file():
        return f"its {file.name} is a folder"
    try:
        text = file.read_text("utf-8")
        value = {} if file.name == TEMPLATE else json.loads(text)
    except UnicodeDecodeError as error:
        what = "its chat template " if file.name == TEMPLATE else "its "
        return f"{what}{file.name} is not UTF-8: {error}"
    except RecursionError:
        return f"its {file.name} is nested too deep to be read"
    except ValueError as error:
        return f"its {file.name} is not valid JSON: {error}"
    if not isinstance(value, dict):
        return f"its {file.name} must hold a JSON object, got {type(value).__name__}"
    return _field_that_cannot_be(value) if file.name == CONFIG else None


def _field_that_cannot_be(config: dict[str, Any]) -> str | None:
    """The fault of a field that transformers would not name; lists are a family's own, with a number a layer."""
    for name in COUNTS:
        value = config.get(name)
        if isinstance(value, str | float | bool | dict) or (isinstance(value, int) and value < 1):
            return f"its {CONFIG} has {name} {value!r}, which must be a whole number of at least 1"
    for name, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"its {CONFIG} has {name} {value}, which is no finite number"
    if not isinstance(kind := config.get("model_type", ""), str):
        return f"its {CONFIG} has model_type {kind!r}, which must be text"
    if not isinstance(quantised := config.get("quantization_config") or {}, dict):
        return f"its {CONFIG} has quantization_config {quantised!r}, which must be an object"
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and pad >= vocabulary:
        return f"its {CONFIG} has pad_token_id {pad}, and its vocab_size is {vocabulary}"
    return None


def config_of(name: str, folder: Path | str) -> Any:
    """The configuration in a folder. Raises ValueError, with what transformers says of it."""
    try:
        code = json.loads((Path(folder) / CONFIG).read_text("utf-8")).get("auto_map") or {}
    except (OSError, ValueError, AttributeError):
        code = {}
    try:
        return _config_of(name, folder)
    except ValueError as error:
        if "trust_remote_code" not in str(error) or not isinstance(code, Mapping):
            raise
        raise ValueError(
            f"no model can be loaded from {name!r}: its {CONFIG} names code of the model's own "
            f"({', '.join(map(str, code.values()))}), which is not run: give the class in a file as --model "
            f"FILE.py:Class --tokenizer {name} --weights {name}"
        ) from error


def _config_of(name: str, folder: Path | str) -> Any:
    return made(name, lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))


def made(name: str, make: Callable[[], Made], what: str = "") -> Made:
    """The result of ``make``; transformers' error about a user's file becomes a ValueError that names the model."""
    try:
        return make()
    except NotImplementedError:
        raise
    except Exception as error:  # KeyError, AttributeError and others, by the field that cannot be
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        if isinstance(error, KeyError) and (key := _key_of(Path(name) / CONFIG, error.args)) is not None:
            kind = f"{key} of its {CONFIG} is nothing that transformers knows: "
        raise ValueError(f"no model can be loaded from {name!r}: {what}{kind}{error}") from error


def _key_of(file: Path, values: Sequence[Any]) -> str | None:
    """The key of a JSON file that has this one value, inner keys behind a dot; None where none or several have."""

    def keys_of(value: Any, key: str) -> list[str]:
        if isinstance(value, dict):
            return [inner for name, item in value.items() for inner in keys_of(item, f"{key}.{name}")]
        return [key[1:]] if [value] == list(values) else []

    try:
        keys = keys_of(json.loads(file.read_text("utf-8")), "")
    except (OSError, ValueError):
        return None
    return keys[0] if len(keys) == 1 else None
