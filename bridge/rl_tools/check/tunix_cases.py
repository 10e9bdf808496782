"""tunix's algo_core: the losses of GRPO and PPO, its aggregations, KL estimators and advantages."""

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
from rl_fn.objectives.dialects.tunix import GRPO, PPO, tunix
from rl_tools.check.cases import GROUP, TOKENS, Case, Example, Numbers, jax_numbers, load, objective

BARE = ("tunix",)


def core() -> Any:
    """tunix.rl.algo_core, without the engines that tunix imports at its top."""
    return load("tunix.rl.algo_core", bare=BARE)


def loss_of(options: dict[str, Any], data: Any, logits: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """grpo_loss_fn or ppo_policy_loss_fn on given data, as a function of the log-probabilities."""
    algo = core()
    ppo = options.get("policy_loss_fn") == "ppo"
    fields = {**(PPO if ppo else GRPO), **options}
    fallback = fields["epsilon"]
    if ppo:
        fields["epsilon_low"] = fields["epsilon_low"] or fallback
    fields["epsilon_high"] = fields["epsilon_high"] or fallback
    config = types.SimpleNamespace(**fields, temperature=1.0)

    def value(x: jax.Array) -> jax.Array:
        with (
            mock.patch.object(algo.common, "compute_per_token_logps", lambda *_, **__: (x, logits)),
            mock.patch.object(algo.nnx, "split", lambda _: (None, None)),
        ):
            function = algo.ppo_policy_loss_fn if ppo else algo.grpo_loss_fn
            return function(None, data, config, 0, 1)[0]

    return value


def loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same on an example, with its gradient."""

    def run(example: Example) -> Numbers:
        mask = jnp.asarray(example.mask).astype(jnp.float32)
        weights = None
        if options.get("sampler_is"):
            log_ratio = jnp.clip(jnp.asarray(example.old_logprobs - example.rollout_logprobs), -20.0, 20.0)
            weights = jnp.minimum(jnp.exp(log_ratio), options["sampler_is_threshold"]) * mask
        data = types.SimpleNamespace(
            prompt_ids=None,
            completion_ids=None,
            completion_mask=mask,
            advantages=jnp.asarray(example.advantages),
            old_per_token_logps=jnp.asarray(example.old_logprobs),
            ref_per_token_logps=jnp.asarray(example.ref_logprobs),
            sampler_is_weights=weights,
        )
        # Two logits (z, 0) whose entropy is what tunix averages; the rest of the function sees log-probabilities alone.
        logits = jnp.stack([jnp.asarray(example.values), jnp.zeros(example.mask.shape)], axis=-1)
        return jax_numbers(loss_of(options, data, logits), example.logprobs)

    return run


def ours(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same by the dialect; the entropies are those of the logits above."""

    def run(example: Example) -> Numbers:
        logits = jnp.stack([jnp.asarray(example.values), jnp.zeros(example.mask.shape)], axis=-1)
        batch = example.batch(entropies=rl_fn.entropy(logits))
        return jax_numbers(lambda x: tunix(options)(batch._replace(logprobs=x))[0], example.logprobs)

    return run


def _plain_loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """GRPO of the paper, with the same β, or the clipped loss alone."""
    recipe: rl_fn.Objective = rl_fn.recipes.grpo(kl_coef=0.04)
    if options.get("beta", 0.04) == 0.0 or options.get("policy_loss_fn") == "ppo":
        recipe = recipe.replace(kl=None)
    if options.get("loss_algo") == "gspo-token":
        recipe = recipe.replace(
            loss=lambda b: rl_fn.gspo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_low=0.2, clip_high=0.2)
        )
    return objective(recipe)


def _advantages(name: str) -> tuple[Callable[[Example], Numbers], Callable[[Example], Numbers]]:
    def peer(example: Example) -> Numbers:
        function = {
            "grpo": core().compute_advantages,
            "rloo": core().compute_rloo_advantages,
            "drgrpo": core().compute_drgrpo_advantages,
        }[name]
        return np.asarray(function(example.rewards.reshape(-1), GROUP)), None

    def dialect(example: Example) -> Numbers:
        rewards = jnp.asarray(example.rewards)
        rollouts = rl_fn.Rollouts(rewards, jnp.ones((*rewards.shape, 1), bool))
        out = tunix({"advantage_estimator": name}).advantages(rollouts)
        return np.asarray(out.advantages).reshape(-1), None

    return peer, dialect


def _gae() -> Case:
    def peer(example: Example) -> Numbers:
        mask = jnp.asarray(example.mask).astype(jnp.float32)
        rewards, values = jnp.asarray(example.token_rewards()), jnp.asarray(example.values)
        out = core().compute_gae_advantages(rewards, values, mask, 0.99, 0.9)
        return np.stack([np.asarray(x) * example.mask for x in out]), None

    def dialect(example: Example) -> Numbers:
        built = tunix({"policy_loss_fn": "ppo", "gamma": 0.99, "gae_lambda": 0.9, "beta": 0.0})
        mask = example.grouped("mask")
        rollouts = rl_fn.Rollouts(jnp.asarray(example.rewards), mask, values=example.grouped("values"))
        out = built.advantages(rollouts)
        return np.stack([np.asarray(x).reshape(-1, TOKENS) for x in out]), None

    return Case("advantage gae", peer, dialect, None, {"hole": True})


def _dpo(smoothing: float) -> Case:
    def peer(example: Example) -> Numbers:
        trainer = load("tunix.sft.dpo.dpo_trainer", bare=BARE, stand_ins=("metrax", "grain", "sentencepiece"))
        ref = jnp.asarray(example.ref_logprobs)
        data = mock.MagicMock(ref_chosen_logps=ref[0::2].sum(-1), ref_rejected_logps=ref[1::2].sum(-1))

        def value(x: jax.Array) -> jax.Array:
            with mock.patch.object(trainer, "compute_logps", lambda *_, **__: (x[0::2].sum(-1), x[1::2].sum(-1))):
                return trainer.dpo_loss_fn(None, data, beta=0.1, label_smoothing=smoothing)[0]

        return jax_numbers(value, example.logprobs)

    def by_rl_fn(example: Example) -> Numbers:
        ref = jnp.asarray(example.ref_logprobs)

        def value(x: jax.Array) -> jax.Array:
            sums = [y.sum(-1) for y in (x[0::2], x[1::2], ref[0::2], ref[1::2])]
            return rl_fn.dpo(*sums, beta=0.1, label_smoothing=smoothing).mean()

        return jax_numbers(value, example.logprobs)

    return Case(f"pairs dpo_loss_fn, label_smoothing={smoothing}", peer, by_rl_fn)


def cases() -> list[Case]:
    """Every loss, aggregation, KL mode and group estimator; GAE; DPO."""
    free = {"beta": 0.0}
    losses: list[dict[str, Any]] = [
        {},
        free,
        {**free, "epsilon_high": 0.28, "epsilon_c": 1.5},
        {**free, "loss_algo": "gspo-token"},
        {**free, "loss_algo": "gspo-token", "loss_agg_mode": "token-mean"},
        {**free, "sampler_is": "token", "sampler_is_threshold": 1.3},
        {"kl_loss_mode": "mse_kl"},
        {"kl_loss_mode": "low_var_kl"},
        {"kl_loss_mode": "low_var_kl", "kl_clamp_value": 0.1},
        {"policy_loss_fn": "ppo"},
        {"policy_loss_fn": "ppo", "epsilon_low": 0.1, "epsilon_c": 1.5, "entropy_coef": 0.01},
    ]
    modes = ("token-mean", "sequence-mean-token-scale", "seq-mean-token-sum", "sequence-mean-token-sum-norm")
    losses += [{**free, "loss_agg_mode": mode} for mode in modes]
    rows = {"empty_row": True, "hole": True}
    out = []
    for o in losses:
        name = " ".join(f"{k}={v}" for k, v in o.items()) or "defaults"
        out.append(Case(f"loss {name}", loss(o), ours(o), _plain_loss(o), rows))
    out += [Case(f"advantage {name}", *_advantages(name)) for name in ("grpo", "rloo", "drgrpo")]
    return [*out, _gae(), _dpo(0.0), _dpo(0.1)]
