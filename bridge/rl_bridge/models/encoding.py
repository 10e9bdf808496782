"""Prompts and completions → token ids, once; nothing is ever decoded and encoded again."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.requests import Message, Prompt
from rl_bridge.data.trajectory import Trajectory, single_turn


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Text, messages (through the tokenizer's chat template) or token ids → token ids."""
    if isinstance(prompt, str):
        ids: Any = _encode_text(tokenizer, prompt, "prompt")
    elif prompt and isinstance(prompt[0], Mapping):
        ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)  # type: ignore[arg-type]
    else:
        ids = prompt
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"a prompt must be text, messages or token ids and not be empty, got {prompt!r}")
    return list(ids)


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as messages: text is the user's, token ids are none."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple(message for message in prompt if isinstance(message, Mapping))


def trajectory_of_row(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> Trajectory:
    """The row's ``answer`` and the end-of-sequence token, as if they had been sampled."""
    text = str(row["answer"])
    tokens = [*_encode_text(tokenizer, text, "answer"), tokenizer.eos_token_id]
    messages = (*messages_of(row["prompt"]), {"role": "assistant", "content": text})
    return single_turn(encode_prompt(tokenizer, row["prompt"]), tokens, row=row, messages=messages)


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str, what: str) -> list[int]:
    try:
        return tokenizer(text, add_special_tokens=what == "prompt").input_ids
    except Exception as error:  # the tokenizers library raises bare Exception for a character it does not know
        raise ValueError(f"the tokenizer cannot encode the {what} {text!r}: {error}") from error
