"""Sampling with a KV cache in one jittable loop, and the log-probabilities of given completions in one forward pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import rl_fn
from experiments.flax_qwen2.decoder import KVCache, Qwen2, empty_cache


class Completions(NamedTuple):
    """``[N, T]`` each. ``mask`` covers the sampled tokens, end of sequence included; the rest is padding."""

    tokens: Array
    mask: Array
    logprobs: Array


class _Loop(NamedTuple):
    step: Array
    caches: list[KVCache]
    valid: Array
    done: Array
    completions: Completions


def generate(
    model: Qwen2,
    prompts: Array,
    prompt_mask: Array,
    key: Array,
    *,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 1.0,
) -> Completions:
    """``samples`` completions of each left-padded prompt, the samples of a prompt adjacent: ``[B·samples, T]``.

    A prompt is read once and its cache shared out to its samples. The loop ends when every row has ended.
    Temperature 0 is greedy. Log-probabilities are those of the distribution sampled from.
    """
    config = model.config
    batch, start = prompts.shape
    capacity = start + max_new_tokens
    valid = jnp.concatenate([prompt_mask, jnp.zeros((batch, max_new_tokens), bool)], axis=1)
    hidden, caches = model.hidden(prompts, valid, empty_cache(config, batch, capacity), 0)
    logits, valid, caches = jax.tree.map(
        lambda x: jnp.repeat(x, samples, axis=0), (model.head(hidden[:, -1]), valid, caches)
    )
    rows = batch * samples

    def sample_token(logits: Array, state: _Loop) -> _Loop:
        """Append one token to every row that has not ended."""
        sampled, sampled_logprobs = rl_fn.sample(jax.random.fold_in(key, state.step), logits, temperature=temperature)
        alive = ~state.done
        token = jnp.where(alive, sampled, config.pad_token_id).astype(jnp.int32)
        completions = Completions(
            state.completions.tokens.at[:, state.step].set(token),
            state.completions.mask.at[:, state.step].set(alive),
            state.completions.logprobs.at[:, state.step].set(jnp.where(alive, sampled_logprobs, 0.0)),
        )
        return state._replace(
            step=state.step + 1,
            valid=state.valid.at[:, start + state.step].set(alive),
            done=state.done | (token == config.eos_token_id),
            completions=completions,
        )

    def body(state: _Loop) -> _Loop:
        last = jax.lax.dynamic_slice_in_dim(state.completions.tokens, state.step - 1, 1, axis=1)
        hidden, caches = model.hidden(last, state.valid, state.caches, start + state.step - 1)
        return sample_token(model.head(hidden[:, -1]), state._replace(caches=caches))

    empty = Completions(
        jnp.full((rows, max_new_tokens), config.pad_token_id, jnp.int32),
        jnp.zeros((rows, max_new_tokens), bool),
        jnp.zeros((rows, max_new_tokens)),
    )
    first = sample_token(logits, _Loop(jnp.int32(0), caches, valid, jnp.zeros(rows, bool), empty))
    final = jax.lax.while_loop(lambda s: (s.step < max_new_tokens) & ~jnp.all(s.done), body, first)
    return final.completions


def completion_logprobs(
    model: Qwen2,
    prompts: Array,
    prompt_mask: Array,
    tokens: Array,
    mask: Array,
    *,
    temperature: float = 1.0,
    pallas: bool | None = None,
) -> tuple[Array, Array]:
    """Log-probabilities and entropies ``[B·samples, T]`` of the completions of ``B`` prompts, differentiable.

    As in ``generate``, the samples of a prompt are adjacent and the prompt is read once for all of them: for short
    completions in groups that is less than half the work of reading every sequence whole. With ``pallas``, which is
    what None means on a TPU, the logits exist a tile at a time only.
    """
    batch, start = prompts.shape
    rows, length = tokens.shape
    samples, rest = divmod(rows, batch)
    if rest:
        raise ValueError(f"completions must be a multiple of the prompts, got {rows} and {batch}")
    # The last token predicts nothing, so it is not read.
    capacity = start + length - 1
    room = jnp.zeros((batch, length - 1), bool)
    caches = empty_cache(model.config, batch, capacity)
    hidden, caches = model.hidden(prompts, jnp.concatenate([prompt_mask, room], axis=1), caches, 0)
    first, prompt_mask, caches = jax.tree.map(
        lambda x: jnp.repeat(x, samples, axis=0), (hidden[:, -1:], prompt_mask, caches)
    )
    valid = jnp.concatenate([prompt_mask, mask[:, :-1]], axis=1)
    later, _ = model.hidden(tokens[:, :-1], valid, caches, start)
    hidden = jnp.concatenate([first, later], axis=1)
    if pallas is None:
        pallas = jax.default_backend() == "tpu"
    if pallas:
        # Not above: rl_kernels imports torch, which the trainer needs nowhere else.
        from rl_kernels.in_jax import linear_logprobs

        scored = linear_logprobs(hidden, model.output_embedding(), tokens, temperature=temperature, backend="pallas")
    else:
        scored = rl_fn.logits_logprobs(model.head(hidden), tokens, temperature=temperature)
    return scored.logprobs, scored.entropy
