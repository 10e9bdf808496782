"""A Qwen2 decoder in flax: from and to Hugging Face folders, sampled from under jit. No torch."""

from experiments.flax_qwen2.config import Qwen2Config
from experiments.flax_qwen2.decoder import KVCache, Qwen2
from experiments.flax_qwen2.huggingface import load_pretrained, save_pretrained
from experiments.flax_qwen2.sampler import Completions, completion_logprobs, generate

__all__ = [
    "Completions",
    "KVCache",
    "Qwen2",
    "Qwen2Config",
    "completion_logprobs",
    "generate",
    "load_pretrained",
    "save_pretrained",
]
