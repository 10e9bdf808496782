"""Tokens that end a turn: those that training teaches, at which sampling and the exported folder stop as well."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.common.terminal import remark
from rl_bridge.data.messages import Chat
from rl_bridge.models.chat_templates import next_header, rendered
from rl_bridge.models.encoding import special_ids
from rl_bridge.models.model_source import ModelSource

GENERATION = "generation_config.json"
_REPLY = "the reply"
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": _PARAMETERS}}
_CALL = {"type": "function", "id": "call00001", "function": {"name": "search", "arguments": {"text": _REPLY}}}
_QUESTION = {"role": "user", "content": "a question"}
_TURNS = (
    Chat([_QUESTION, {"role": "assistant", "content": _REPLY}]),
    Chat([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], tools=(_TOOL,)),
)
"""A turn that answers, and one that calls a tool: Harmony ends these with tokens of their own."""


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids with which a trained turn ends: the end-of-sequence token, and the chat template's own ends of a turn.

    Raises:
        ValueError: for a tokenizer without an end-of-sequence token of one id.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"the tokenizer needs an eos_token with one id, its eos_token_id is {eos!r}")
    ends = [] if tokenizer.chat_template is None else [_template_end(tokenizer, turn) for turn in _TURNS]
    return frozenset([eos, *(end for end in ends if end is not None)])


def _template_end(tokenizer: PreTrainedTokenizerBase, turn: Chat) -> int | None:
    """The special token that the template writes behind the last turn of the assistant; None: it writes none.

    None too, where a header of the next turn follows: rows of such a template are refused.
    """
    if next_header(tokenizer) is not None:
        return None
    try:
        _, reply, behind = rendered(tokenizer, turn, generation_prompt=False).rpartition(_REPLY)
        ids = tokenizer(behind, add_special_tokens=False).input_ids if reply else []
    except Exception:  # rows are refused with the template's words; tokenizers raises bare Exception
        return None
    ends = special_ids(tokenizer)
    return next((token for token in reversed(ids) if token in ends and token != tokenizer.unk_token_id), None)


def generation_stops(model: PreTrainedModel) -> frozenset[int]:
    """Ids at which the model's ``generation_config`` stops."""
    named: Any = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([named] if isinstance(named, int) else named or [])


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a completion: those that end a trained turn, and all that the model's generation names.

    Raises:
        ValueError: for a tokenizer without an end-of-sequence token.
    """
    return turn_ends(tokenizer) | generation_stops(model)


def remark_on_ends(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name the tokens that end a turn and those at which generation stops, once, where a turn would go on for ever."""
    with torch.device("meta"):
        model = source.empty()
    stops = generation_stops(model)
    if model.generation_config is None or not (others := turn_ends(tokenizer) - stops):
        return
    stopping = f"stops at {_named(tokenizer, stops)}" if stops else "names no token to stop at"
    remark(
        f"turns end with {_named(tokenizer, others)}, and the model's {GENERATION} {stopping}: completions are drawn "
        "until any of these tokens, and the exported folder names all"
    )


def _named(tokenizer: PreTrainedTokenizerBase, tokens: Collection[int]) -> str:
    return " and ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in sorted(tokens))


def add_turn_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the folder's ``generation_config.json`` stop at all tokens that end a trained turn.

    A file that names them stays as it is, and a folder without one, as of a classifier, gets none. A tokenizer without
    an end of a sequence names no end.
    """
    file = folder / GENERATION
    if not file.is_file() or tokenizer.eos_token_id is None:
        return
    config = json.loads(file.read_text())
    named = config.get("eos_token_id")
    stops = [named] if isinstance(named, int) else list(named or [])
    if others := sorted(turn_ends(tokenizer) - set(stops)):
        config["eos_token_id"] = [*stops, *others] if stops or len(others) > 1 else others[0]
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
