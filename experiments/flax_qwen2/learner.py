"""Sampling, evaluation and both updates as jitted functions over a mesh: batches are sharded, parameters replicated."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rl_fn
from experiments.flax_qwen2.decoder import Qwen2
from experiments.flax_qwen2.sampler import completion_logprobs, generate

Metrics = dict[str, Any]
Tree = TypeVar("Tree")


class TrainState(NamedTuple):
    """What an update changes: a pytree."""

    parameters: nnx.State
    optimizer: optax.OptState


class Problems(NamedTuple):
    """Left-padded prompts ``[B, P]`` and right-padded completions ``[B, T]`` of the rows, end of sequence included."""

    prompts: Array
    prompt_mask: Array
    completions: Array
    completion_mask: Array


class Rollout(NamedTuple):
    """Prompts ``[B, …]`` with their groups of completions ``[B·G, T]``, as the update reads them."""

    prompts: Array
    prompt_mask: Array
    tokens: Array
    mask: Array
    logprobs: Array
    advantages: Array
    ref_logprobs: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """``samples`` completions a prompt, of which the groups of ``groups`` prompts are trained on: those that can be."""

    samples: int
    groups: int
    max_new_tokens: int
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Learner:
    """Four jitted functions and what they share. Those that return a TrainState consume the one they are given."""

    supervised: Callable[[TrainState, Problems], tuple[TrainState, Metrics]]
    rollout: Callable[[nnx.State, nnx.State | None, Array, Problems], tuple[Rollout, Metrics]]
    update: Callable[[TrainState, Rollout], tuple[TrainState, Metrics]]
    correct: Callable[[nnx.State, Problems], Array]
    """1 for each problem whose greedy completion is right."""
    supervised_optimizer: optax.GradientTransformation
    optimizer: optax.GradientTransformation
    mesh: Mesh

    def place(self, tree: Tree) -> Tree:
        """Replicate a pytree over the mesh."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def fresh(self, parameters: nnx.State, *, supervised: bool) -> TrainState:
        """Parameters with an untouched optimizer: the warm start's or GRPO's."""
        optimizer = self.supervised_optimizer if supervised else self.optimizer
        return self.place(TrainState(parameters, optimizer.init(parameters)))  # pyright: ignore[reportArgumentType]


def data_mesh(devices: int | None = None) -> Mesh:
    """One axis over the first ``devices`` devices, or all of them."""
    available = jax.devices()
    if devices is not None and not 1 <= devices <= len(available):
        raise ValueError(f"devices must be 1 … {len(available)}, got {devices}")
    return Mesh(available[:devices], ("data",))


def exact_match(tokens: Array, wanted: Array) -> Array:
    """1 where a completion is the wanted one to the last token, padding included, else 0."""
    return jnp.all(tokens == wanted, axis=-1).astype(jnp.float32)


def build_learner(
    graph: nnx.GraphDef,
    mesh: Mesh,
    *,
    objective: rl_fn.Objective,
    sampling: Sampling,
    supervised_optimizer: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
) -> Learner:
    """Compile-once functions for one model, one objective and one mesh."""
    data, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    groups, size, temperature = sampling.groups, sampling.samples, sampling.temperature

    def model(parameters: nnx.State) -> Qwen2:
        return nnx.merge(graph, parameters)

    def apply(
        state: TrainState, loss: Callable[[nnx.State], tuple[Array, Metrics]], transform: optax.GradientTransformation
    ) -> tuple[TrainState, Metrics]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.parameters)
        updates, optimizer_state = transform.update(gradient, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        return TrainState(parameters, optimizer_state), metrics  # pyright: ignore[reportArgumentType]

    def supervised(state: TrainState, batch: Problems) -> tuple[TrainState, Metrics]:
        def loss(parameters: nnx.State) -> tuple[Array, Metrics]:
            logprobs, _ = completion_logprobs(model(parameters), *batch)
            value = rl_fn.aggregate(-logprobs, batch.completion_mask, "token-mean")
            return value, {"nll": value}

        return apply(state, loss, supervised_optimizer)

    def rollout(
        parameters: nnx.State, reference: nnx.State | None, key: Array, batch: Problems
    ) -> tuple[Rollout, Metrics]:
        sampled = generate(
            model(parameters),
            batch.prompts,
            batch.prompt_mask,
            key,
            max_new_tokens=sampling.max_new_tokens,
            samples=size,
            temperature=temperature,
        )
        tokens, mask, logprobs = (x.reshape(-1, size, x.shape[-1]) for x in sampled)
        rewards = exact_match(tokens, batch.completions[:, None, :])
        rollouts = rl_fn.Rollouts(rewards, mask)
        advantages = objective.advantages(rollouts).advantages
        # Static shapes: always the same number of groups is trained on. Those that the objective counts come first;
        # where they are too few, the places left are masked and weigh nothing.
        counted = objective.selection(rollouts, advantages).mask
        trained = jnp.any(counted, axis=(1, 2))
        chosen = jnp.argsort(~trained)[:groups]
        kept = counted[chosen]
        prompts, prompt_mask = batch.prompts[chosen], batch.prompt_mask[chosen]
        tokens, kept, logprobs, advantages = (
            x.reshape(-1, x.shape[-1]) for x in (tokens[chosen], kept, logprobs[chosen], advantages[chosen])
        )
        ref_logprobs = None
        if objective.kl is not None:
            assert reference is not None
            ref_logprobs, _ = completion_logprobs(
                model(reference), prompts, prompt_mask, tokens, kept, temperature=temperature
            )
        metrics = {
            "reward": jnp.mean(rewards),
            "informative": jnp.mean(trained.astype(jnp.float32)),
            "tokens": jnp.sum(mask.astype(jnp.int32)),
        }
        return Rollout(prompts, prompt_mask, tokens, kept, logprobs, advantages, ref_logprobs), metrics

    def update(state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
        return apply(
            state, lambda parameters: policy_loss(model(parameters), objective, rollout, temperature), optimizer
        )

    def correct(parameters: nnx.State, problems: Problems) -> Array:
        sampled = generate(
            model(parameters),
            problems.prompts,
            problems.prompt_mask,
            jax.random.key(0),
            max_new_tokens=sampling.max_new_tokens,
            temperature=0.0,
        )
        return exact_match(sampled.tokens, problems.completions)

    return Learner(
        supervised=jax.jit(supervised, in_shardings=(whole, data), out_shardings=whole, donate_argnums=0),
        rollout=jax.jit(rollout, in_shardings=(whole, whole, whole, data), out_shardings=(data, whole)),
        update=jax.jit(update, in_shardings=(whole, data), out_shardings=whole, donate_argnums=0),
        correct=jax.jit(correct, in_shardings=(whole, data), out_shardings=whole),
        supervised_optimizer=supervised_optimizer,
        optimizer=optimizer,
        mesh=mesh,
    )


def policy_loss(
    model: Qwen2, objective: rl_fn.Objective, rollout: Rollout, temperature: float = 1.0
) -> tuple[Array, Metrics]:
    """The objective on a rollout; π_old is what was kept at sampling time."""
    logprobs, entropies = completion_logprobs(
        model, rollout.prompts, rollout.prompt_mask, rollout.tokens, rollout.mask, temperature=temperature
    )
    return objective(
        rl_fn.Batch(
            logprobs=logprobs,
            old_logprobs=rollout.logprobs,
            advantages=rollout.advantages,
            mask=rollout.mask,
            ref_logprobs=rollout.ref_logprobs,
            entropies=entropies,
        )
    )
