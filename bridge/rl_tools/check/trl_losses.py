"""TRL's GRPOTrainer: its loss, its advantages and its importance weights, run from the installed source."""

import collections
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_fn.objectives.dialects.trl import DEFAULTS, trl
from rl_tools.check.cases import GROUP, Case, Example, Numbers, load, objective, run_branch, torch_numbers


def _accelerator() -> Any:
    def same(x: Any, **_: Any) -> Any:
        return x

    return types.SimpleNamespace(
        num_processes=1,
        gather=same,
        reduce=same,
        gather_for_metrics=same,
        pad_across_processes=same,
        sync_gradients=True,
    )


def _weights(trainer: Any, options: dict[str, Any], t: dict[str, torch.Tensor]) -> torch.Tensor | None:
    if not (options["use_vllm"] and options["vllm_importance_sampling_correction"]):
        return None
    names = run_branch(
        trainer._generate_and_score_completions,
        "self.use_vllm and self.vllm_importance_sampling_correction",
        "vllm_importance_sampling_ratio",
        {
            "self": types.SimpleNamespace(**options),
            "completion_mask": t["mask"],
            "tool_mask": None,
            "old_per_token_logps": t["old_logprobs"],
            "sampling_per_token_logps": t["rollout_logprobs"],
        },
    )
    return names["vllm_importance_sampling_ratio"]


def loss_of(options: dict[str, Any], t: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """GRPOTrainer._compute_loss on the given tensors, as a function of the log-probabilities."""
    trainer = load("trl.trainer.grpo_trainer").GRPOTrainer
    o = {**DEFAULTS, **options}
    high = o["epsilon_high"]
    me = types.SimpleNamespace(
        **{k: v for k, v in o.items() if k not in ("epsilon", "epsilon_high")},
        epsilon_low=o["epsilon"],
        epsilon_high=o["epsilon"] if high is None else high,
        args=types.SimpleNamespace(**o, steps_per_generation=1),
        accelerator=_accelerator(),
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=o["entropy_coef"] != 0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
    )
    me.get_high_entropy_mask = lambda *a: trainer.get_high_entropy_mask(me, *a)
    ids = torch.zeros(t["mask"].shape, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": t["mask"],
        "advantages": t["advantages"],
        "old_per_token_logps": t["old_logprobs"],
        "ref_per_token_logps": t["ref_logprobs"],
        "num_items_in_batch": t["mask"].sum(),
    }
    if o["use_vllm"]:
        inputs["sampling_per_token_logps"] = t["rollout_logprobs"]
        inputs["importance_sampling_ratio"] = _weights(trainer, o, t)

    def run(logprobs: torch.Tensor) -> torch.Tensor:
        me._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, t["entropies"], None)
        return trainer._compute_loss(me, None, inputs)

    return run


def loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same with its gradient."""

    def run(example: Example) -> Numbers:
        t = example.torch()
        return torch_numbers(loss_of(options, t)(t["logprobs"]), t["logprobs"])

    return run


def advantages(options: dict[str, Any], group: int) -> Callable[[Example], Numbers]:
    """The advantages of GRPOTrainer, from one reward per answer."""

    def run(example: Example) -> Numbers:
        trainer = load("trl.trainer.grpo_trainer").GRPOTrainer
        o = {**DEFAULTS, **options}
        rewards = torch.from_numpy(example.rewards.reshape(-1, 1))
        me = types.SimpleNamespace(
            **o,
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            reward_funcs=[None],
        )
        variables = {
            "self": me,
            "rewards_per_func": rewards,
            "unscorable_mask": torch.isnan(rewards).all(dim=1),
            "num_generations": group,
            "device": "cpu",
        }
        names = run_branch(
            trainer._generate_and_score_completions, "self.multi_objective_aggregation", "advantages", variables
        )
        return names["advantages"].numpy(), None

    return run


def our_advantages(options: dict[str, Any], group: int) -> Callable[[Example], Numbers]:
    """The same by the dialect."""

    def run(example: Example) -> Numbers:
        rewards = jnp.asarray(example.rewards.reshape(-1, group))
        out = trl(options).advantages(rl_fn.Rollouts(rewards, jnp.ones((*rewards.shape, 1), bool)))
        return np.asarray(out.advantages).reshape(-1), None

    return run


def _plain(options: dict[str, Any]) -> Callable[[Example], Numbers] | None:
    """rl_fn's own recipe of the name, or its own loss in the paper's aggregation."""
    kind = options.get("loss_type", "dapo")
    recipe: rl_fn.Objective = rl_fn.recipes.dapo()
    if kind == "grpo":
        recipe = rl_fn.recipes.grpo().replace(kl=None)
    elif kind == "dr_grpo":
        recipe = rl_fn.recipes.dr_grpo(max_completion_length=512)
    elif kind == "cispo":
        high = options.get("epsilon_high", 0.2)
        recipe = recipe.replace(
            loss=lambda b: rl_fn.cispo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_high=high)
        )
    elif kind in ("sapo", "vespo", "luspo"):
        function = getattr(rl_fn, kind)
        recipe = recipe.replace(
            aggregation=rl_fn.components.Aggregation("seq-mean-token-mean"),
            loss=lambda b: function(b.logprobs, b.old_logprobs, b.advantages, b.mask),
        )
    return objective(recipe)


def cases() -> list[Case]:
    """Every loss type, and every option that changes the numbers."""
    sequence = {"importance_sampling_level": "sequence"}
    kl = {"beta": 0.05}
    vllm = {"use_vllm": True}
    losses: list[dict[str, Any]] = [
        {"loss_type": kind} for kind in ("dapo", "grpo", "bnpo", "dr_grpo", "sapo", "vespo")
    ]
    losses += [
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"loss_type": "cispo"},
        {"loss_type": "luspo", **sequence},
        {"loss_type": "grpo", **sequence},
        {"loss_type": "sapo", **sequence},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dapo", "delta": 1.5},
        {"loss_type": "grpo", **kl},
        {"loss_type": "grpo", **kl, "use_bias_correction_kl": False},
        {"loss_type": "grpo", **kl, **sequence},
        {"loss_type": "grpo", "entropy_coef": 0.01},
        {"loss_type": "dapo", "top_entropy_quantile": 0.4},
        {"loss_type": "dapo", "top_entropy_quantile": 0.4, "entropy_coef": 0.01},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, **vllm},
        {"loss_type": "vespo", **vllm, "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "vespo", **vllm, "vllm_importance_sampling_mode": "token_mask"},
    ]
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    losses += [{**vllm, "vllm_importance_sampling_mode": mode} for mode in modes]
    losses += [{**vllm, **kl, "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_mode": modes[0]}]
    out = []
    rows = {"empty_row": True, "hole": True}
    for options in losses:
        name = " ".join(f"{k}={v}" for k, v in options.items())
        out.append(Case(f"loss {name}", loss(options), objective(trl(options)), _plain(options), rows))
    for scale, group in (("group", GROUP), ("batch", GROUP), ("none", GROUP), ("group", 1)):
        options = {"scale_rewards": scale}
        plain = our_default_advantages(scale, group)
        name = f"advantage scale_rewards={scale}, groups of {group}"
        out.append(Case(name, advantages(options, group), our_advantages(options, group), plain))
    return out


def our_default_advantages(scale: str, group: int) -> Callable[[Example], Numbers]:
    """rl_fn's GRPO with its own eps."""

    def run(example: Example) -> Numbers:
        rewards = jnp.asarray(example.rewards.reshape(-1, group))
        return np.asarray(rl_fn.grpo_advantages(rewards, scale=scale)).reshape(-1), None

    return run
