"""A small Qwen2 made from a config: big enough to learn arithmetic, small enough for two CPU cores."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM


def tiny_qwen2(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    max_positions: int = 512,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """A Qwen2 decoder with random weights (about 1.05 M parameters by default), in float32, tied embeddings.

    Weights are a function of ``seed`` alone: the global random state is left as it was.
    """
    if hidden % heads:
        raise ValueError(f"hidden must be a multiple of heads, got hidden={hidden}, heads={heads}")
    special: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        # 1/sqrt(hidden) rather than the 0.02 of billion-parameter models: at width 128 it learns twice as fast.
        initializer_range=min(0.05, hidden**-0.5),
        bos_token_id=None,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()
