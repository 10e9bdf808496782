"""OpenRLHF's PolicyLoss, compute_approx_kl and compute_advantages_and_returns."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_fn.objectives.dialects.openrlhf import DEFAULTS, openrlhf
from rl_tools.check.cases import GROUP, ROWS, Case, Example, Numbers, jax_numbers, load, objective, torch_numbers

PACKAGES = ("models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")
BARE = ("openrlhf", *(f"openrlhf.{name}" for name in PACKAGES))
STAND_INS = ("deepspeed", "ray", "openrlhf.trainer.ray.launcher")


def module(name: str) -> Any:
    """A module of OpenRLHF, without what its packages import for engines and clusters."""
    return load(f"openrlhf.{name}", bare=BARE, stand_ins=STAND_INS)


def loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The actor's loss: PolicyLoss, less entropy, plus KL, as its training step adds them."""

    def run(example: Example) -> Numbers:
        losses, utils, t = module("models.loss"), module("models.utils"), example.torch()
        o = {**DEFAULTS, **options}
        low, high = o["actor.eps_clip_low_high"] or (o["actor.eps_clip"],) * 2
        policy = losses.PolicyLoss(
            clip_eps_low=low,
            clip_eps_high=high,
            dual_clip=o["actor.dual_clip"],
            token_level_loss=o["actor.loss_agg_mode"] == "token-mean",
            policy_loss_type=o["actor.policy_loss_type"],
            is_correction_level=o["algo.advantage.is_correction_level"],
            is_correction_mode=o["algo.advantage.is_correction_mode"],
            is_correction_gating=o["algo.advantage.is_correction_gating"],
            is_correction_threshold=list(o["algo.advantage.is_correction_threshold"]),
        )
        args = (t["logprobs"], t["old_logprobs"], t["advantages"], t["mask"], t["rollout_logprobs"])
        total = policy(*args)[0]
        if o["algo.kl.use_loss"]:
            kl = utils.compute_approx_kl(
                t["logprobs"],
                t["ref_logprobs"],
                log_probs_old=t["old_logprobs"],
                kl_estimator=o["algo.kl.estimator"],
                unbiased_gradient=o["algo.kl.unbiased_gradient"],
            )
            total = total + o["algo.kl.init_coef"] * losses.aggregate_loss(kl, t["mask"])
        if o["actor.entropy_coef"]:
            total = total - o["actor.entropy_coef"] * losses.aggregate_loss(t["entropies"], t["mask"])
        return torch_numbers(total, t["logprobs"])

    return run


def advantages(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """RemoteExperienceMaker.compute_advantages_and_returns on one Experience."""

    def run(example: Example) -> Numbers:
        maker = module("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        t, o = example.torch(), {**DEFAULTS, **options}
        space = types.SimpleNamespace
        kl = torch.zeros_like(t["old_logprobs"])
        if o["algo.kl.init_coef"] > 0:
            kl = module("models.utils").compute_approx_kl(
                t["old_logprobs"], t["ref_logprobs"], kl_estimator=o["algo.kl.estimator"]
            )
        names = ("estimator", "gamma", "lambd", "no_std_norm")
        args = space(
            rollout=space(n_samples_per_prompt=GROUP, max_new_tokens=None),
            algo=space(advantage=space(**{name: o[f"algo.advantage.{name}"] for name in names})),
            reward=space(
                clip_range=o["reward.clip_range"],
                overlong_buffer_len=None,
                stop_properly_penalty_coef=None,
            ),
        )
        me = space(
            strategy=space(args=args),
            kl_ctl=space(value=o["algo.kl.init_coef"]),
            advantage_estimator=o["algo.advantage.estimator"],
            get_advantages_and_returns=lambda *a: maker.get_advantages_and_returns(None, *a),
            get_cumulative_returns=lambda *a: maker.get_cumulative_returns(None, *a),
        )
        experience = space(
            index=list(range(ROWS)),
            rewards=t["rewards"].reshape(-1),
            kl=kl,
            action_mask=t["mask"],
            values=t["values"],
            info={},
        )
        maker.compute_advantages_and_returns(me, [experience])
        out = experience.advantages * t["mask"]
        if o["algo.advantage.estimator"] == "gae":
            out = torch.stack([out, experience.returns * t["mask"]])
        return out.detach().numpy(), None

    return run


def ours(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    """The same by the dialect."""

    def run(example: Example) -> Numbers:
        built = openrlhf(options)
        mask, rewards = example.grouped("mask"), jnp.asarray(example.rewards)
        fields = {name: example.grouped(name) for name in ("old_logprobs", "ref_logprobs")}
        out = built.advantages(rl_fn.Rollouts(rewards, mask, values=example.grouped("values"), **fields))
        if options["algo.advantage.estimator"] == "gae":
            return np.stack([np.asarray(x).reshape(ROWS, -1) for x in out]), None
        return np.asarray(out.advantages).reshape(ROWS, -1), None

    return run


def _plain_loss(options: dict[str, Any]) -> Callable[[Example], Numbers]:
    mode = options.get("actor.loss_agg_mode", "token-mean")
    recipe = rl_fn.recipes.dapo(clip_high=0.2).replace(aggregation=rl_fn.components.Aggregation(mode))
    if options.get("actor.policy_loss_type") == "gspo":
        recipe = recipe.replace(
            aggregation=rl_fn.components.Aggregation("seq-mean-token-mean"),
            loss=lambda b: rl_fn.gspo(b.logprobs, b.old_logprobs, b.advantages, b.mask, clip_low=0.2, clip_high=0.2),
        )
    if options.get("algo.kl.use_loss"):
        recipe = recipe.replace(kl=rl_fn.components.KL(options["algo.kl.estimator"], options["algo.kl.init_coef"]))
    return objective(recipe)


def _pairs(name: str, function: Callable[..., jax.Array], **constants: Any) -> Case:
    """DPOLoss and the reward model's losses, on sums of log-probabilities for sequences."""

    def peer(example: Example) -> Numbers:
        losses, t = module("models.loss"), example.torch()
        x = t["logprobs"]
        sums = [y.sum(-1) for y in (x[0::2], x[1::2], t["ref_logprobs"][0::2], t["ref_logprobs"][1::2])]
        if name in ("PairWiseLoss", "LogExpLoss"):
            return torch_numbers(getattr(losses, name)()(sums[0], sums[1]), x)
        smoothing = constants.get("label_smoothing", 0.0)
        return torch_numbers(losses.DPOLoss(0.1, smoothing, ipo="IPO" in name)(*sums)[0], x)

    def by_rl_fn(example: Example) -> Numbers:
        ref = jnp.asarray(example.ref_logprobs)

        def value(x: jax.Array) -> jax.Array:
            sums = [y.sum(-1) for y in (x[0::2], x[1::2], ref[0::2], ref[1::2])]
            return function(*(sums[:2] if name in ("PairWiseLoss", "LogExpLoss") else sums), **constants).mean()

        return jax_numbers(value, example.logprobs)

    return Case(f"pairs {name}", peer, by_rl_fn)


def cases() -> list[Case]:
    """Losses, corrections, KL estimators, advantage estimators, DPO and reward-model losses."""
    level, gate = "algo.advantage.is_correction_level", "algo.advantage.is_correction_gating"
    clip, threshold = "algo.advantage.is_correction_mode", "algo.advantage.is_correction_threshold"
    kl = {"algo.kl.use_loss": True, "algo.kl.init_coef": 0.1}
    losses: list[dict[str, Any]] = [
        {},
        {"actor.loss_agg_mode": "seq-mean-token-mean"},
        {"actor.eps_clip_low_high": (0.2, 0.28), "actor.dual_clip": 1.5},
        {"actor.policy_loss_type": "gspo"},
        {"actor.policy_loss_type": "gspo", level: "token"},
        {level: "token", clip: "clip", threshold: (0.7, 1.4)},
        {level: "token", threshold: (0.7, 1.4)},
        {level: "seq", threshold: (0.9, 1.1)},
        {level: "token", gate: "binary_kl", threshold: (0.0, 0.01)},
        {level: "seq", gate: "binary_kl", threshold: (0.0, 0.02)},
        {level: "seq", gate: "tv", threshold: (0.0, 0.08)},
    ]
    losses += [{**kl, "algo.kl.estimator": name} for name in ("k1", "k2", "k3")]
    losses += [{**kl, "algo.kl.estimator": name, "algo.kl.unbiased_gradient": True} for name in ("k1", "k3")]
    losses.append({**kl, "algo.kl.estimator": "k2", "actor.loss_agg_mode": "seq-mean-token-mean"})
    losses.append({"actor.entropy_coef": 0.01, "actor.policy_loss_type": "gspo"})
    rows = {"empty_row": True, "hole": True}
    out = [Case(f"loss {_name(o)}", loss(o), objective(openrlhf(o)), _plain_loss(o), rows) for o in losses]
    estimators = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
    name, no_kl = "algo.advantage.estimator", {"algo.kl.init_coef": 0.0}
    settings: list[dict[str, Any]] = [{name: e, **no_kl} for e in estimators]
    settings += [{name: e, "algo.kl.init_coef": 0.1, "algo.kl.estimator": "k3"} for e in ("gae", "rloo", "reinforce")]
    discount = {"algo.advantage.gamma": 0.9, "algo.advantage.lambd": 0.8}
    settings += [{name: e, **no_kl, **discount} for e in ("gae", "reinforce")]
    settings.append({name: "reinforce", **no_kl, "algo.advantage.no_std_norm": True})
    settings.append({name: "rloo", **no_kl, "reward.clip_range": (-0.5, 0.5)})
    out += [Case(f"advantage {_name(o)}", advantages(o), ours(o), None, {"hole": True}) for o in settings]
    out += [
        _pairs("DPOLoss", rl_fn.dpo, beta=0.1),
        _pairs("DPOLoss, label_smoothing=0.1", rl_fn.dpo, beta=0.1, label_smoothing=0.1),
        _pairs("DPOLoss, IPO", rl_fn.ipo, beta=0.1),
        _pairs("PairWiseLoss", rl_fn.bradley_terry),
        _pairs("LogExpLoss", rl_fn.bradley_terry),
    ]
    return out


def _name(options: dict[str, Any]) -> str:
    return " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in options.items()) or "defaults"
