"""verl's core_algos: every policy loss, aggregation, KL estimator and advantage estimator that rl_fn has."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_fn.objectives.dialects.options import flattened
from rl_fn.objectives.dialects.verl import verl
from rl_tools.check.cases import GROUP, PROMPTS, TOKENS, Case, Example, Numbers, load, objective, torch_numbers

LAM = 0.9


def core() -> Any:
    """verl.trainer.ppo.core_algos."""
    return load("verl.trainer.ppo.core_algos")


def actor_config(options: dict[str, Any]) -> Any:
    """verl's own ActorConfig with options of the section actor."""
    workers = load("verl.workers.config")
    actor = {k.removeprefix("actor."): v for k, v in flattened(options).items() if k.startswith("actor.")}
    policy = {k.removeprefix("policy_loss."): actor.pop(k) for k in list(actor) if k.startswith("policy_loss.")}
    config = workers.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        ppo_mini_batch_size=1,
        policy_loss=workers.PolicyLossConfig(**policy),
        **actor,
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    return config


def loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The actor's loss: policy loss, less entropy, plus KL, each by verl's own functions."""

    def run(example: Example) -> Numbers:
        algos, config, t = core(), actor_config(options), example.torch()
        flat = flattened(options)
        level = flat.get("algorithm.rollout_correction.rollout_is")
        weights = None
        if level is not None:
            helper = load("verl.trainer.ppo.rollout_corr_helper")
            weights, _ = helper.compute_rollout_correction_weights(
                t["old_logprobs"] - t["rollout_logprobs"],
                t["mask"],
                level,
                flat.get("algorithm.rollout_correction.rollout_is_threshold", 2.0),
            )
        mask = t["mask"].bool()
        total, _ = algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
            old_log_prob=t["old_logprobs"],
            log_prob=t["logprobs"],
            advantages=t["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )

        def mean(x: torch.Tensor) -> torch.Tensor:
            return algos.agg_loss(x, mask, config.loss_agg_mode, **config.global_batch_info)

        if config.entropy_coeff:
            total = total - config.entropy_coeff * mean(t["entropies"])
        if config.use_kl_loss:
            kl = algos.kl_penalty(t["logprobs"], t["ref_logprobs"], config.kl_loss_type)
            total = total + config.kl_loss_coef * mean(kl)
        return torch_numbers(total, t["logprobs"])

    return run


def _groups(group: int) -> np.ndarray:
    return np.repeat(np.arange(PROMPTS * GROUP // group), group)


def advantages(name: str, group: int, options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """A registered advantage estimator, as the trainer calls it."""

    def run(example: Example) -> Numbers:
        algos, t = core(), example.torch()
        mask = t["mask"]
        rewards = torch.from_numpy(example.token_rewards())
        if options.get("algorithm.use_kl_in_reward"):
            kl = algos.kl_penalty(t["old_logprobs"], t["ref_logprobs"], options.get("algorithm.kl_penalty", "kl"))
            rewards = rewards - options["algorithm.kl_ctrl.kl_coef"] * kl * mask
        if name == "gae":
            out = algos.compute_gae_advantage_return(rewards, t["values"], mask, 1.0, LAM)
            return torch.stack([x * mask for x in out]).numpy(), None
        scale = options.get("algorithm.norm_adv_by_std_in_grpo", True)
        config = load("verl.trainer.config").AlgoConfig(gamma=LAM, norm_adv_by_std_in_grpo=scale)
        arguments: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask, "config": config}
        if name != "reinforce_plus_plus":
            arguments["index"] = _groups(group)
        if name.startswith("grpo"):
            arguments["norm_adv_by_std_in_grpo"] = scale
        return (algos.get_adv_estimator_fn(name)(**arguments)[0] * mask).numpy(), None

    return run


def ours(name: str, group: int, options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same by the dialect."""

    def run(example: Example) -> Numbers:
        extra = {"algorithm.gamma": 1.0 if name == "gae" else LAM, "algorithm.lam": LAM}
        built = verl({**options, **extra, "algorithm.adv_estimator": name})
        shape = (-1, group, TOKENS)
        old, ref, mask = (
            jnp.asarray(getattr(example, field)).reshape(shape) for field in ("old_logprobs", "ref_logprobs", "mask")
        )
        rewards = jnp.asarray(example.rewards).reshape(-1, group)
        values = jnp.asarray(example.values).reshape(shape)
        out = built.advantages(rl_fn.Rollouts(rewards, mask, old_logprobs=old, ref_logprobs=ref, values=values))
        if name == "gae":
            return np.stack([np.asarray(x).reshape(-1, TOKENS) for x in out]), None
        return np.asarray(out.advantages).reshape(-1, TOKENS), None

    return run


PLAIN: dict[str, Callable[[Any], Any]] = {
    "grpo": rl_fn.grpo_advantages,
    "grpo_vectorized": rl_fn.grpo_advantages,
    "rloo": rl_fn.rloo_advantages,
    "rloo_vectorized": rl_fn.rloo_advantages,
    "gpg": rl_fn.gpg_advantages,
    "grpo_passk": rl_fn.passk_advantages,
}


def _plain_advantages(name: str, group: int) -> Callable[[Example], Numbers] | None:
    if name not in PLAIN or (group == 1 and name not in ("grpo", "grpo_vectorized")):
        return None

    def run(example: Example) -> Numbers:
        per_answer = np.asarray(PLAIN[name](jnp.asarray(example.rewards).reshape(-1, group))).reshape(-1, 1)
        return per_answer * example.mask, None

    return run


def _plain_loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same loss with rl_fn's (the paper's) aggregation and no clamps."""
    mode = options.get("actor.policy_loss.loss_mode", "vanilla")
    aggregation = options.get("actor.loss_agg_mode", "token-mean")
    if mode in ("gspo", "sapo", "geo_mean"):
        aggregation = "seq-mean-token-mean"
    max_completion_length = 512.0 if aggregation == "seq-mean-token-sum-norm" else None
    functions: dict[str, Callable[[rl_fn.Batch], Any]] = {
        "gspo": lambda b: rl_fn.gspo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_low=0.2, clip_high=0.2),
        "sapo": lambda b: rl_fn.sapo(b.logprobs, b.old_logprobs, b.advantages, b.mask),
        "geo_mean": lambda b: rl_fn.gmpo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_low=0.2, clip_high=0.2),
        "gpg": rl_fn.components.Reinforce(),
        "cispo": lambda b: rl_fn.cispo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_high=0.2),
        "dro": lambda b: rl_fn.dro(b.logprobs, b.old_logprobs, b.advantages, b.mask, beta=0.3),
        "dppo_tv": lambda b: rl_fn.dppo(b.logprobs, b.old_logprobs, b.advantages, b.mask, threshold=0.2),
        "dppo_kl": lambda b: rl_fn.dppo(
            b.logprobs, b.old_logprobs, b.advantages, b.mask, threshold=0.2, divergence="kl"
        ),
    }
    recipe = rl_fn.recipes.dapo(clip_high=0.2).replace(
        aggregation=rl_fn.components.Aggregation(aggregation, max_completion_length),
        loss=functions.get(mode, rl_fn.components.PPOClip()),
    )
    return objective(recipe)


def cases() -> list[Case]:
    """Every registered loss that rl_fn has, every aggregation, KL and estimator."""
    mode, agg, norm = "actor.policy_loss.loss_mode", "actor.loss_agg_mode", "seq-mean-token-sum-norm"
    losses: list[dict[str, Any]] = [{}]
    losses += [{mode: name} for name in ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "cispo")]
    losses += [{mode: "dro", "actor.policy_loss.dro_beta": 0.3}, {mode: "dppo_tv", "actor.clip_ratio_c": 1.2}]
    losses += [{agg: name} for name in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", norm)]
    losses += [{agg: norm, "actor.loss_scale_factor": 512}, {mode: "gspo", agg: "seq-mean-token-mean"}]
    kls = ("kl", "abs", "mse", "low_var_kl", "kl+", "low_var_kl+", "k1", "k2", "k3", "k3+", "abs+", "k2+")
    penalised = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
    losses += [{**penalised, "actor.kl_loss_type": name} for name in kls]
    losses += [{**penalised, mode: name, "actor.entropy_coeff": 0.01} for name in ("vanilla", "sapo", "geo_mean")]
    weights = "algorithm.rollout_correction.rollout_is"
    bands = (("token", 1.5), ("token", "0.7_1.4"), ("sequence", 1.5), ("sequence", "0.1_9.0"))
    losses += [{weights: level, f"{weights}_threshold": threshold} for level, threshold in bands]
    rows = {"empty_row": True, "hole": True}
    out = [Case(f"loss {_name(o)}", loss(o), objective(verl(o)), _plain_loss(o), rows) for o in losses]
    far = {**rows, "spread": 12.0}
    # Beyond ±20 nats the losses are of size 1e8: only relative differences mean anything there.
    out.append(Case("loss vanilla, log-ratios of ±30", loss({}), objective(verl({})), None, far, tolerance=1e-5))
    estimators = ("gae", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
    estimators += ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    combinations: list[tuple[str, int, dict[str, Any]]] = [(name, GROUP, {}) for name in estimators]
    combinations += [(name, 1, {}) for name in estimators if name not in ("gae", "grpo_passk", "reinforce_plus_plus")]
    combinations += [(name, GROUP, {"algorithm.norm_adv_by_std_in_grpo": False}) for name in ("grpo", "grpo_passk")]
    penalty = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}
    combinations += [(name, GROUP, penalty) for name in ("gae", "grpo", "reinforce_plus_plus")]
    for name, group, o in combinations:
        title = f"advantage {name}, groups of {group} {_name(o)}".strip()
        functions = advantages(name, group, o), ours(name, group, o)
        plain = None if o else _plain_advantages(name, group)
        out.append(Case(title, *functions, plain, {"hole": True}))
    return out


def _name(options: dict[str, Any]) -> str:
    return " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in options.items()) or "defaults"
