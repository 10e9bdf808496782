"""Which pieces the options of OpenRLHF, tunix and NeMo-RL become: each option off its default, each default."""

from typing import Any

import pytest

from rl_fn import dialects
from rl_fn.objectives.components import GAE, Aggregation, EntropyBonus, Reinforce
from rl_fn.objectives.dialects import dialect_advantages as adv
from rl_fn.objectives.dialects.dialect_losses import (
    ImportanceBand,
    RatioClip,
    TokenLoss,
)
from rl_fn.objectives.dialects.dialect_terms import BoundedKL, OverWidth
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses import token_level as token_losses

TOKENS, ANSWERS = Aggregation("token-mean"), Aggregation("seq-mean-token-mean")


def expected(name, advantage, loss, aggregation, **others):
    return Objective(name, advantage, loss, aggregation, **others, strict=False)


def openrlhf(loss, kind="ppo", aggregation=TOKENS, advantage=None, **others):
    critic = adv.BiasedGAE(1.0, 1.0, carry=False)
    penalty = {"reward_kl": BoundedKL("k1", 0.01, bound=10.0)} | others
    return expected(f"openrlhf {kind}", advantage or critic, loss, aggregation, **penalty)


def tunix(loss, aggregation=ANSWERS, kind="grpo", estimator="grpo", **others):
    kl = {"kl": BoundedKL("k1", 0.04)} | others
    return expected(f"tunix {kind}", adv.TunixGroup(estimator), loss, aggregation, **kl)


def nemo(loss, aggregation=TOKENS, advantage=None, **others):
    kl = {"kl": BoundedKL("k3", 0.01, low=-20.0, high=20.0, bound=10.0, gradient="score")} | others
    return expected("nemo_rl clipped_pg", advantage or adv.NeMoRLAdvantage(), loss, aggregation, **kl)


PLAIN, HELD = RatioClip(0.2, 0.2), RatioClip(0.2, 0.2, limit=20.0)
OPEN_IS, ESTIMATOR = "algo.advantage.is_correction_", "algo.advantage.estimator"
TIS, NEMO_IS = "loss_fn.truncated_importance_sampling_", {"loss_fn.use_importance_sampling_correction": True}
SEQUENCES = {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False}
NO_KL: dict[str, Any] = {"kl": None, "reward_kl": None}

OPENRLHF = [
    ({}, openrlhf(HELD)),
    (
        {"actor.eps_clip": 0.3, "actor.dual_clip": 4.0, "algo.kl.init_coef": -1.0, "algo.advantage.gamma": 0.9}
        | {"algo.advantage.lambd": 0.8, "algo.advantage.no_std_norm": True},
        openrlhf(
            RatioClip(0.3, 0.3, 4.0, limit=20.0),
            advantage=adv.BiasedGAE(0.9, 0.8, carry=False, divide_by_std=False),
            **NO_KL,
        ),
    ),
    (
        {"actor.eps_clip_low_high": [0.1, 0.3], ESTIMATOR: "rloo", "reward.clip_range": [-2, 3]},
        openrlhf(RatioClip(0.1, 0.3, limit=20.0), advantage=adv.OpenRLHFAdvantage("rloo", 1.0, True, (-2.0, 3.0))),
    ),
    ({ESTIMATOR: "reinforce"}, openrlhf(HELD, advantage=adv.OpenRLHFAdvantage("reinforce"))),
    (
        {"actor.policy_loss_type": "gspo", "algo.kl.init_coef": 0.0, f"{OPEN_IS}level": "seq"},
        openrlhf(RatioClip(0.2, 0.2, level="sequence", behaviour="rollout"), "gspo", ANSWERS, **NO_KL),
    ),
    (
        {"actor.policy_loss_type": "gspo", "algo.kl.use_loss": True, "actor.entropy_coef": 0.1},
        openrlhf(
            RatioClip(0.2, 0.2, level="sequence"),
            "gspo",
            ANSWERS,
            kl=BoundedKL("k1", 0.01, bound=10.0),
            kl_aggregation=TOKENS,
            entropy=EntropyBonus(0.1),
            entropy_aggregation=TOKENS,
            reward_kl=None,
        ),
    ),
    (
        {"algo.kl.use_loss": True, "algo.kl.estimator": "k3", "algo.kl.unbiased_gradient": True}
        | {"actor.entropy_coef": 0.1},
        openrlhf(
            HELD,
            kl=BoundedKL("k3", 0.01, low=-10.0, bound=10.0, gradient="weighted k2"),
            entropy=EntropyBonus(0.1),
            reward_kl=None,
        ),
    ),
    # Without a KL in the loss there is no gradient to correct, and without a coefficient no KL to average.
    ({"algo.kl.unbiased_gradient": True}, openrlhf(HELD)),
    (
        {"algo.kl.use_loss": True, "algo.kl.init_coef": 0, "actor.loss_agg_mode": "seq-mean-token-mean"},
        openrlhf(HELD, aggregation=ANSWERS, **NO_KL),
    ),
    (
        {f"{OPEN_IS}level": "token"},
        openrlhf(HELD, correction=ImportanceBand(0.5, 5.0, "mask", "token", keep_tokens=True)),
    ),
    (
        {f"{OPEN_IS}level": "token", f"{OPEN_IS}mode": "clip", f"{OPEN_IS}threshold": 3.0},
        openrlhf(HELD, correction=ImportanceBand(0.0, 3.0, "clip", "token")),
    ),
    (
        {f"{OPEN_IS}level": "seq", f"{OPEN_IS}gating": "tv", f"{OPEN_IS}threshold": [0.3]},
        openrlhf(HELD, correction=ImportanceBand(0.0, 0.3, "mask", "sequence", "tv", keep_tokens=True)),
    ),
]
TUNIX = [
    ({}, tunix(HELD)),
    (
        {"epsilon": 0.1, "epsilon_high": 0.3, "epsilon_c": 4.0, "beta": 0.0, "advantage_estimator": "rloo"},
        tunix(RatioClip(0.1, 0.3, 4.0, limit=20.0), estimator="rloo", kl=None),
    ),
    (
        {"kl_loss_mode": "low_var_kl", "beta": 0.5, "kl_clamp_value": 3, "loss_agg_mode": "token-mean"},
        tunix(HELD, TOKENS, kl=BoundedKL("k3", 0.5, bound=3.0)),
    ),
    (
        {"loss_algo": "gspo-token", "sampler_is": "token", "loss_agg_mode": "sequence-mean-token-scale"},
        tunix(
            RatioClip(0.2, 0.2, limit=20.0, level="sequence-token", cap=10.0),
            OverWidth(),
            "gspo-token",
            correction=ImportanceBand(high=2.0, limit=20.0),
        ),
    ),
    (
        {"sampler_is": "token", "sampler_is_threshold": 5, "kl_loss_mode": "mse_kl"},
        tunix(HELD, correction=ImportanceBand(high=5.0, limit=20.0), kl=BoundedKL("k2", 0.04)),
    ),
    (
        {"policy_loss_fn": "ppo"},
        expected("tunix ppo", GAE(1.0, 0.95), PLAIN, TOKENS, reward_kl=BoundedKL("k3", 0.04)),
    ),
    (
        {"policy_loss_fn": "ppo", "epsilon": 0.1, "epsilon_low": 0.4, "epsilon_c": 4.0, "entropy_coef": 0.2}
        | {"gamma": 0.9, "gae_lambda": 0.8, "beta": None},
        expected("tunix ppo", GAE(0.9, 0.8), RatioClip(0.4, 0.1, 4.0), TOKENS, entropy=EntropyBonus(0.2)),
    ),
    (
        {"policy_loss_fn": "ppo", "epsilon_high": 0.3, "kl_method": "kl", "kl_clamp_value": 2.0},
        expected("tunix ppo", GAE(), RatioClip(0.2, 0.3), TOKENS, reward_kl=BoundedKL("k1", 0.04, bound=2.0)),
    ),
]
NEMO = [
    ({}, nemo(PLAIN)),
    (
        {"loss_fn.ratio_clip_min": 0.1, "loss_fn.ratio_clip_max": 0.3, "loss_fn.ratio_clip_c": 4.0}
        | {"loss_fn.reference_policy_kl_penalty": 0}
        | {f"grpo.adv_estimator.{x}": False for x in ("normalize_rewards", "minus_baseline")},
        nemo(RatioClip(0.1, 0.3, 4.0), advantage=adv.NeMoRLAdvantage("grpo", False, True, False), kl=None),
    ),
    (
        SEQUENCES | {"grpo.adv_estimator.use_leave_one_out_baseline": False},
        nemo(
            RatioClip(0.2, 0.2, level="sequence"),
            ANSWERS,
            adv.NeMoRLAdvantage("grpo", True, False),
        ),
    ),
    (
        {"grpo.adv_estimator.name": "gae"},
        nemo(PLAIN, advantage=adv.BiasedGAE(1.0, 0.95, True)),
    ),
    (
        {"grpo.adv_estimator.name": "gae", "grpo.adv_estimator.gae_gamma": 0.9, "grpo.adv_estimator.gae_lambda": 0.8}
        | {"grpo.adv_estimator.normalize_advantages": False},
        nemo(PLAIN, advantage=adv.BiasedGAE(0.9, 0.8, False)),
    ),
    (
        {"loss_fn.use_cispo": True},
        nemo(TokenLoss(token_losses.cispo, (("clip_low", 0.2), ("clip_high", 0.2)))),
    ),
    ({"loss_fn.disable_ppo_ratio": True}, nemo(Reinforce())),
    (
        {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_type": "k1"}
        | {"loss_fn.kl_input_clamp_value": None, "loss_fn.kl_output_clamp_value": 5},
        nemo(PLAIN, kl=None, reward_kl=BoundedKL("k1", 0.01, bound=5.0)),
    ),
    (
        {"loss_fn.use_on_policy_kl_approximation": True, "loss_fn.kl_input_clamp_value": 3}
        | {"loss_fn.kl_output_clamp_value": None},
        nemo(PLAIN, kl=BoundedKL("k3", 0.01, low=-3.0, high=3.0, weight="rollout")),
    ),
    (NEMO_IS, nemo(PLAIN, correction=ImportanceBand(level="token"))),
    (
        NEMO_IS | SEQUENCES,
        nemo(RatioClip(0.2, 0.2, level="sequence"), ANSWERS, correction=ImportanceBand(level="sequence_sum")),
    ),
    (
        NEMO_IS | {f"{TIS}type": "tis", f"{TIS}ratio": 3},
        nemo(PLAIN, correction=ImportanceBand(0.0, 3.0, "clip", "token")),
    ),
    (
        NEMO_IS | {f"{TIS}type": "icepop", f"{TIS}ratio": 3, f"{TIS}ratio_min": 0.5},
        nemo(PLAIN, correction=ImportanceBand(0.5, 3.0, "mask", "token")),
    ),
    (
        NEMO_IS | {f"{TIS}type": "seq-mask-tis", f"{TIS}ratio": 3, f"{TIS}ratio_min": 0.5},
        nemo(PLAIN, correction=ImportanceBand(0.5, 3.0, "mask", "sequence", keep_tokens=True)),
    ),
]
ROWS = {"openrlhf": OPENRLHF, "tunix": TUNIX, "nemo_rl": NEMO}
REFUSED = [
    ("openrlhf", {f"{OPEN_IS}level": "seq", f"{OPEN_IS}mode": "clip"}, "requires is_correction_level=token"),
    (
        "openrlhf",
        {f"{OPEN_IS}level": "token", f"{OPEN_IS}mode": "clip", f"{OPEN_IS}gating": "tv"},
        "requires is_correction_level=token",
    ),
    ("openrlhf", {f"{OPEN_IS}level": "token", f"{OPEN_IS}gating": "tv"}, "takes an upper bound only"),
    ("nemo_rl", {"loss_fn.use_cispo": True} | SEQUENCES, "use_cispo goes with"),
    ("nemo_rl", {"loss_fn.use_cispo": True, "loss_fn.ratio_clip_c": 3.0}, "use_cispo goes with"),
    ("nemo_rl", {"loss_fn.use_cispo": True, "loss_fn.disable_ppo_ratio": True}, "use_cispo goes with"),
    ("nemo_rl", {"loss_fn.use_cispo": True, "loss_fn.token_level_loss": False}, "use_cispo goes with"),
    (
        "nemo_rl",
        {"loss_fn.use_cispo": True, "loss_fn.sequence_level_importance_ratios": True},
        "use_cispo goes with",
    ),
    ("nemo_rl", {"loss_fn.disable_ppo_ratio": True, "loss_fn.ratio_clip_c": 3.0}, "is not covered"),
    ("nemo_rl", {"loss_fn.sequence_level_importance_ratios": True}, "need token_level_loss=False"),
    ("nemo_rl", {f"{TIS}type": "tis"}, "needs use_importance_sampling_correction"),
    ("nemo_rl", NEMO_IS | {f"{TIS}type": "tis"}, "must be positive"),
    ("nemo_rl", NEMO_IS | {f"{TIS}type": "tis", f"{TIS}ratio": 0}, "must be positive"),
    ("nemo_rl", NEMO_IS | {f"{TIS}type": "icepop", f"{TIS}ratio": 2.0}, "needs truncated"),
    (
        "nemo_rl",
        NEMO_IS | SEQUENCES | {f"{TIS}type": "seq-mask-tis", f"{TIS}ratio": 2.0, f"{TIS}ratio_min": 0.5},
        "does not go with",
    ),
]


@pytest.mark.parametrize(("library", "row"), [(name, i) for name, rows in ROWS.items() for i in range(len(rows))])
def test_options_become_these_pieces(library, row):
    options, objective = ROWS[library][row]
    assert getattr(dialects, library)(options) == objective


@pytest.mark.parametrize(("library", "options", "reason"), REFUSED)
def test_what_is_not_covered_is_refused(library, options, reason):
    with pytest.raises(ValueError, match=reason):
        getattr(dialects, library)(options)
