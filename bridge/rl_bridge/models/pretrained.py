"""Models and tokenizers in Hugging Face format: loaded, made new for given rows, and saved, also from shards."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.common.files import replacing
from rl_bridge.data.rows import RESPONSES
from rl_bridge.models.exported_files import ExportTypes, add_older_names, write_generation_config
from rl_bridge.models.model_folder import CONFIG
from rl_bridge.models.model_source import ModelSource, PretrainedSource
from rl_bridge.models.own_model import OwnModel, save_own
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.models.tokenizer_files import tokenizer_in, write_tokenizer
from rl_bridge.models.turn_ends import add_turn_ends
from rl_bridge.weights.manifest import class_of, full, is_peft
from rl_bridge.weights.source import source_of

# A model and its tokenizer: from a folder or hub id in Hugging Face format, or small and new for given rows.


def pretrained(name: str) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """A model that every worker loads its own part of, and its tokenizer with a pad token.

    The pad token is the end-of-sequence token if the tokenizer names none.

    Raises:
        ValueError: there is no such model; it is no causal language model or quantised; weights are missing, unknown or
            of another shape, by name; the tokenizer has no end-of-sequence token.
    """
    source = PretrainedSource(name)
    with torch.device("meta"):
        source.check(source.empty())  # what is wrong shows before workers are made
    return source, tokenizer_of(name)


def load_pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same in this process, in float32.

    Raises:
        ValueError: as ``pretrained`` does.
    """
    source, tokenizer = pretrained(name)
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model, tokenizer


def require_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    *,
    kind: str = "teacher",
    of_other: str = "the policy",
) -> None:
    """Refuse a model that reads the ids of another one, and does not have each token of the other's under its id.

    ``kind``: what the model is, for the message; ``of_other``: whose the other vocabulary is.

    Raises:
        ValueError: the model's numbers would be of other tokens.
    """
    if tokenizer is other:
        return
    # No id stands for a token that only the first model knows.
    if missing := other.get_vocab().items() - tokenizer.get_vocab().items():
        name, example = tokenizer.name_or_path, min(missing, key=lambda pair: pair[1])
        named = f"the {kind} {name!r}" if name else f"the {kind}"
        raise ValueError(
            f"{named} has another vocabulary than {of_other}: it has no token {example}. Models that meet need one "
            "tokenizer"
        )


def tokenizer_of(name: str, *, alone: bool = False) -> PreTrainedTokenizerBase:
    """A model's tokenizer, with a pad token. Raises ValueError where there is none, or none with an eos_token.

    ``alone``: no model need lie beside it.
    """
    tokenizer = tokenizer_in(name, alone=alone)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def new_for_rows(rows: Sequence[Mapping[str, Any]], *, seed: int) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """A tiny Qwen2 and a character tokenizer over the characters of the rows' prompts and responses."""
    if not rows:
        raise ValueError("a new model's tokenizer has the characters of the rows, and there are no rows")
    for row in rows:
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"{row.get('_where', 'a row')}: chat messages need a model with a chat template (--model)")
    texts = (str(row[name]) for row in rows for name in ("prompt", *RESPONSES) if row.get(name) is not None)
    tokenizer = character_tokenizer("".join(sorted({character for text in texts for character in text})))
    return TinySource.for_tokenizer(tokenizer, seed=seed), tokenizer


def save_pretrained(
    folder: Path, policy: Any, tokenizer: PreTrainedTokenizerBase, types: ExportTypes | None = None
) -> None:
    """Write model and tokenizer in Hugging Face format; the folder appears when it is whole.

    Its ``generation_config.json`` stops at every token that ends a trained turn. Without ``types`` the weights have the
    dtype that they are trained in.
    """
    with replacing(folder) as temporary:
        policy.save_pretrained(str(temporary), *(() if types is None else (types,)))
        write_tokenizer(tokenizer, temporary)
        add_turn_ends(temporary, tokenizer)


# A model that may be sharded, written whole in Hugging Face format.


@torch.no_grad()
def save_sharded_model(model: PreTrainedModel, folder: str, types: ExportTypes | None = None) -> None:
    """Write configuration and weights. All workers that hold a part call the function; the first of them writes.

    The folder is what transformers itself writes of a plain model: experts one by one, under the names of the hub. Of a
    class of the user's own it has the weights under the class's names. A model with adapters is written merged, as
    every reader knows it.

    Raises:
        ValueError: a number that a dtype of ``types`` has not.
    """
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    # A parameter that tensor parallelism leaves whole knows nothing of the other tensor ranks.
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    writes = mesh is None or all(place == 0 for place in mesh.get_coordinate() or ())
    state: dict[str, torch.Tensor] = {}
    refused: list[ValueError] = []
    for name, tensor in source_of(model).stream(adapter=False):
        # Gathered one at a time, and kept by the worker that writes alone.
        whole = full(tensor)
        if not writes or refused:
            continue  # the other workers take part in the gathering of each weight
        try:
            state[name] = whole.cpu() if types is None else types.cast(name, whole.cpu())
        except ValueError as error:
            refused.append(error)
    try:
        if refused:
            raise refused[0]
        if writes:
            dtype = next(iter(state.values())).dtype if types is None else types.dtype
            write_model(model, state, Path(folder), dtype)
    finally:  # the others wait there, whatever the error
        for group in mesh.get_all_groups() if mesh is not None else []:
            if group.size() > 1:
                dist.barrier(group)


def write_model(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Have a plain model of the class write the tensors: transformers goes by names of classes, which FSDP changes.

    ``dtype`` is what the configuration says. Without tensors the files beside them are written.

    Raises:
        RuntimeError: transformers has written nothing.
    """
    model = cast(PreTrainedModel, model.get_base_model()) if is_peft(model) else model
    if isinstance(model, OwnModel):
        save_own(model, state, folder)
        return
    kind = class_of(model)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # some families look theirs up in a table of their own
    with torch.device("meta"):
        plain = kind(config).to(dtype)
    if plain.can_generate():
        plain.generation_config = GenerationConfig()  # what transformers refuses to write is written below
    # transformers lets the first process of the world alone write, which may have no part in this engine.
    plain.should_save_on_this_rank = lambda is_main_process: True
    plain.save_pretrained(str(folder), state_dict=state)
    if not (folder / CONFIG).is_file():
        raise RuntimeError(f"{kind.__name__}.save_pretrained wrote no {CONFIG} into {folder}")
    add_older_names(folder)
    if model.can_generate() and model.generation_config is not None:
        write_generation_config(model.generation_config, folder)
