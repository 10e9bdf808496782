"""Qwen2 in flax nnx: RMSNorm, rotary positions, grouped-query attention with QKV bias, SwiGLU, tied or own head.

Attribute names are those of the Hugging Face checkpoint, so that loading is a renaming and not a table.

Between attentions the tokens of all rows lie in one axis, ``[B·T, hidden]``: with the batch and time axes apart, XLA on
the CPU takes more than twice as long for the MLP's gradient, and a TPU's matrix unit sees the same matrix either way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.flax_qwen2.config import Qwen2Config


class KVCache(NamedTuple):
    """Keys and values of one layer, ``[B, capacity, kv_heads, head_dim]``: static shapes, in place under jit."""

    keys: Array
    values: Array


def empty_cache(config: Qwen2Config, batch: int, capacity: int) -> list[KVCache]:
    shape = (batch, capacity, config.num_key_value_heads, config.head_size)
    return [KVCache(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + self.eps) * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary embedding of ``x`` ``[B, T, heads, D]``; the two halves of D are the pairs, as in Hugging Face."""
    half = x.shape[-1] // 2
    frequencies = jnp.asarray(theta, jnp.float32) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.initializer_range)
        query, key_value = (n * config.head_size for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nnx.Linear(config.hidden_size, query, kernel_init=init, rngs=rngs)
        self.k_proj = nnx.Linear(config.hidden_size, key_value, kernel_init=init, rngs=rngs)
        self.v_proj = nnx.Linear(config.hidden_size, key_value, kernel_init=init, rngs=rngs)
        self.o_proj = nnx.Linear(query, config.hidden_size, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(
        self, x: Array, positions: Array, visible: Array, cache: KVCache | None, offset: Array | int
    ) -> tuple[Array, KVCache]:
        heads = (*positions.shape, -1, self.config.head_size)
        query = rotate(self.q_proj(x).reshape(heads), positions, self.config.rope_theta)
        new = KVCache(
            rotate(self.k_proj(x).reshape(heads), positions, self.config.rope_theta), self.v_proj(x).reshape(heads)
        )
        if cache is not None:
            new = KVCache(
                jax.lax.dynamic_update_slice_in_dim(cache.keys, new.keys, offset, axis=1),
                jax.lax.dynamic_update_slice_in_dim(cache.values, new.values, offset, axis=1),
            )
        attended = jax.nn.dot_product_attention(query, new.keys, new.values, mask=visible[:, None])
        return self.o_proj(attended.reshape(x.shape[0], -1)), new


class MLP(nnx.Module):
    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.initializer_range)
        wide = config.intermediate_size
        self.gate_proj = nnx.Linear(config.hidden_size, wide, use_bias=False, kernel_init=init, rngs=rngs)
        self.up_proj = nnx.Linear(config.hidden_size, wide, use_bias=False, kernel_init=init, rngs=rngs)
        self.down_proj = nnx.Linear(wide, config.hidden_size, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: Array, positions: Array, visible: Array, cache: KVCache | None, offset: Array | int
    ) -> tuple[Array, KVCache]:
        attended, cache = self.self_attn(self.input_layernorm(x), positions, visible, cache, offset)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen2(nnx.Module):
    """The decoder with its language-model head."""

    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs
            )

    def hidden(
        self, tokens: Array, valid: Array, caches: list[KVCache] | None = None, offset: Array | int = 0
    ) -> tuple[Array, list[KVCache]]:
        """Hidden states after the last norm, ``[B, T, hidden]``, and the caches with this call's keys and values.

        ``valid`` is True for real tokens. Without a cache it is ``[B, T]``; with one it is ``[B, capacity]``, covers
        the whole cache, and ``tokens`` sit at ``offset … offset + T`` of it. Padding may be on the left: positions
        count real tokens only.
        """
        length = tokens.shape[1]
        order = jnp.arange(valid.shape[1])
        columns = offset + jnp.arange(length)
        positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
        positions = jax.lax.dynamic_slice_in_dim(positions, offset, length, axis=1)
        visible = valid[:, None, :] & (order[None, None, :] <= columns[None, :, None])
        x = self.embed_tokens(tokens.reshape(-1))
        updated = []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, positions, visible, None if caches is None else caches[i], offset)
            updated.append(cache)
        return self.norm(x).reshape(*tokens.shape, -1), updated

    def head(self, hidden: Array) -> Array:
        """Logits ``[..., V]`` of hidden states ``[..., hidden]``."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = self.embed_tokens.attend(flat) if self.config.tie_word_embeddings else self.lm_head(flat)
        return logits.reshape(*hidden.shape[:-1], -1)

    def output_embedding(self) -> Array:
        """``[V, hidden]``: ``head`` is the product with its transpose."""
        return self.embed_tokens.embedding[...] if self.config.tie_word_embeddings else self.lm_head.kernel[...].T

    def __call__(self, tokens: Array, valid: Array | None = None) -> Array:
        """Logits ``[B, T, V]`` of the next token."""
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        return self.head(self.hidden(tokens, valid)[0])
