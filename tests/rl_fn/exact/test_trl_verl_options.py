"""Which pieces the options of TRL and verl become: every option off its default somewhere, and every default."""

import math

import pytest

from rl_fn import dialects
from rl_fn.objectives.components import GAE, Aggregation, EntropyBonus, GRPOAdvantage, Reinforce
from rl_fn.objectives.dialects import dialect_advantages as adv
from rl_fn.objectives.dialects.dialect_losses import (
    Gated,
    ImportanceBand,
    RatioClip,
    TokenLoss,
    capped_reinforce,
    trusted_reinforce,
)
from rl_fn.objectives.dialects.dialect_terms import AllRows, BoundedKL, OverWidth
from rl_fn.objectives.dialects.trl import EntropyGate, OffPolicyGate, OverHighEntropy, SequenceSapo, Vespo
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses import regularised as regularised_losses
from rl_fn.policy_losses import sequence_level as sequence_losses
from rl_fn.policy_losses import token_level as token_losses

TOKENS, ANSWERS = Aggregation("token-mean"), Aggregation("seq-mean-token-mean")
INF = math.inf
VESPO = (("k_pos", 2.0), ("lambda_pos", 3.0), ("k_neg", 3.0), ("lambda_neg", 2.0))
CHANGED = (("k_pos", 1.5), ("lambda_pos", 3.5), ("k_neg", 2.5), ("lambda_neg", 4.5))
VLLM = {"use_vllm": True}


def expected(name, advantage, loss, aggregation, **others):
    return Objective(name, advantage, loss, aggregation, **others, strict=False)


def trl(kind, loss, aggregation=TOKENS, scale="group", **others):
    return expected(f"trl {kind}", GRPOAdvantage(scale, 1e-4), loss, aggregation, **others)


def verl(mode, loss, aggregation=TOKENS, advantage=None, **others):
    return expected(f"verl {mode}", advantage or GAE(1.0, 1.0), loss, aggregation, **others)


PLAIN = RatioClip(0.2, 0.2)
DUAL = RatioClip(0.2, 0.2, 3.0, limit=20.0)
LOW_HIGH = {"actor.clip_ratio_low": 0.1, "actor.clip_ratio_high": 0.3}
K3 = BoundedKL("k3", 0.001, low=-20.0, high=20.0, bound=10.0)
USE_KL = {"actor.use_kl_loss": True}
MODE, IS = "actor.policy_loss.loss_mode", "algorithm.rollout_correction.rollout_is"

TRL = [
    ({}, trl("dapo", PLAIN)),
    (
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.25, "delta": 1.25, "beta": 0.2}
        | {"scale_rewards": False, "importance_sampling_level": "sequence"},
        trl(
            "grpo",
            RatioClip(0.1, 0.25, 1.25, level="sequence"),
            AllRows("seq-mean-token-mean"),
            "none",
            kl=BoundedKL("k3", 0.2, weight="sequence"),
        ),
    ),
    (
        {"beta": 0.2, "use_bias_correction_kl": False, "scale_rewards": "batch"},
        trl("dapo", PLAIN, scale="batch", kl=BoundedKL("k3", 0.2)),
    ),
    ({"scale_rewards": True, "beta": 0.1}, trl("dapo", PLAIN, kl=BoundedKL("k3", 0.1, weight="token"))),
    (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "importance_sampling_level": "sequence"},
        trl("sapo", SequenceSapo((("tau_pos", 0.7), ("tau_neg", 1.05)), "sequence"), AllRows("seq-mean-token-mean")),
    ),
    (
        {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
        trl("sapo", SequenceSapo((("tau_pos", 1.0), ("tau_neg", 2.0)), "token"), AllRows("seq-mean-token-mean")),
    ),
    ({"loss_type": "vespo"}, trl("vespo", Vespo(VESPO))),
    (
        {f"vespo_{name}": value for name, value in CHANGED}
        | {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}
        | VLLM
        | {"vllm_importance_sampling_clip_min": 0.5},
        trl("vespo", Vespo(CHANGED, ImportanceBand(0.5, 3.0, "mask", "token"))),
    ),
    (VLLM, trl("dapo", PLAIN, correction=ImportanceBand(0.0, 3.0, "mask", "sequence_sum"))),
    (
        VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": None},
        trl("dapo", PLAIN, correction=ImportanceBand(0.0, INF, "clip", "sequence_sum")),
    ),
    (
        VLLM | {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 4.0},
        trl("dapo", PLAIN, correction=ImportanceBand(0.0, 4.0, "clip", "token")),
    ),
    (VLLM | {"vllm_importance_sampling_correction": False}, trl("dapo", PLAIN)),
    ({"loss_type": "luspo"}, trl("luspo", PLAIN, AllRows("seq-mean-token-sum"))),
    ({"loss_type": "dr_grpo"}, trl("dr_grpo", PLAIN, AllRows("seq-mean-token-sum-norm", 512.0))),
    (
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        trl("dr_grpo", PLAIN, AllRows("seq-mean-token-sum-norm", 9.0)),
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
        trl("cispo", TokenLoss(capped_reinforce, (("cap", 5.0), ("level", "sequence")))),
    ),
    ({"off_policy_mask_threshold": 0.3}, trl("dapo", Gated(PLAIN, (OffPolicyGate(0.3, use_vllm=False),)))),
    (
        {"entropy_coef": 0.1},
        trl("dapo", PLAIN, entropy=EntropyBonus(0.1), entropy_aggregation=OverHighEntropy(fraction=1.0)),
    ),
    (
        VLLM | {"off_policy_mask_threshold": 0.3, "top_entropy_quantile": 0.4, "entropy_coef": 0.1},
        trl(
            "dapo",
            Gated(PLAIN, (OffPolicyGate(0.3, True), EntropyGate(0.4))),
            correction=ImportanceBand(0.0, 3.0, "mask", "sequence_sum"),
            entropy=EntropyBonus(0.1),
            entropy_aggregation=OverHighEntropy(fraction=0.4),
        ),
    ),
]
VERL = [
    ({}, verl("vanilla", DUAL)),
    ({"actor.clip_ratio_low": None, "actor.clip_ratio_high": None}, verl("vanilla", DUAL)),
    ({"actor.clip_ratio": 0.3, "actor.clip_ratio_low": None}, verl("vanilla", RatioClip(0.3, 0.2, 3.0, limit=20.0))),
    (
        LOW_HIGH | {"actor.clip_ratio_c": 4.0, "algorithm.gamma": 0.9, "algorithm.lam": 0.8},
        verl("vanilla", RatioClip(0.1, 0.3, 4.0, limit=20.0), advantage=GAE(0.9, 0.8)),
    ),
    *(
        (
            LOW_HIGH | {MODE: f"dppo_{divergence}"},
            verl(
                f"dppo_{divergence}",
                TokenLoss(
                    trusted_reinforce,
                    (("low", 0.1), ("high", 0.3), ("ratio_cap", 3.0), ("divergence", divergence)),
                ),
            ),
        )
        for divergence in ("tv", "kl")
    ),
    (LOW_HIGH | {MODE: "gspo"}, verl("gspo", RatioClip(0.1, 0.3, level="sequence-token", cap=10.0))),
    ({MODE: "gpg"}, verl("gpg", Reinforce())),
    (LOW_HIGH | {MODE: "cispo"}, verl("cispo", TokenLoss(token_losses.cispo, (("clip_low", 0.1), ("clip_high", 0.3))))),
    (
        {MODE: "dro", "actor.policy_loss.dro_beta": 0.5},
        verl("dro", TokenLoss(regularised_losses.dro, (("beta", 0.5),))),
    ),
    (
        LOW_HIGH | {MODE: "geo_mean", "actor.entropy_coeff": 0.1},
        verl(
            "geo_mean",
            TokenLoss(sequence_losses.gmpo, (("clip_low", 0.1), ("clip_high", 0.3))),
            AllRows("seq-mean-token-mean"),
            entropy=EntropyBonus(0.1),
            entropy_aggregation=TOKENS,
        ),
    ),
    (
        USE_KL | {MODE: "sapo", "actor.loss_agg_mode": "token-sum"},
        verl(
            "sapo",
            TokenLoss(token_losses.sapo, (("tau_pos", 1.0), ("tau_neg", 1.05)), limit=20.0),
            ANSWERS,
            kl=K3,
            kl_aggregation=Aggregation("token-sum"),
        ),
    ),
    (
        USE_KL | {"actor.kl_loss_type": "low_var_kl+", "actor.kl_loss_coef": 0.3, "actor.entropy_coeff": 0.2},
        verl(
            "vanilla",
            DUAL,
            kl=BoundedKL("k3", 0.3, low=-20.0, high=20.0, bound=10.0, gradient="k2"),
            entropy=EntropyBonus(0.2),
        ),
    ),
    (USE_KL | {"actor.kl_loss_type": "mse+"}, verl("vanilla", DUAL, kl=BoundedKL("k2", 0.001))),
    (USE_KL | {"actor.kl_loss_type": "abs+"}, verl("vanilla", DUAL, kl=BoundedKL("abs", 0.001, gradient="k2"))),
    ({"algorithm.use_kl_in_reward": True}, verl("vanilla", DUAL, reward_kl=BoundedKL("k1", 0.001))),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k3", "algorithm.kl_ctrl.kl_coef": 0.5},
        verl("vanilla", DUAL, reward_kl=BoundedKL("k3", 0.5, low=-20.0, high=20.0, bound=10.0)),
    ),
    ({"actor.loss_agg_mode": "seq-mean-token-sum-norm"}, verl("vanilla", DUAL, OverWidth())),
    (
        {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_scale_factor": 50},
        verl("vanilla", DUAL, Aggregation("seq-mean-token-sum-norm", 50.0)),
    ),
    ({IS: "token"}, verl("vanilla", DUAL, correction=ImportanceBand(0.0, 2.0, "clip", "token", limit=20.0))),
    (
        {IS: "sequence", f"{IS}_threshold": "0.5_4.0"},
        verl("vanilla", DUAL, correction=ImportanceBand(0.5, 4.0, "mask", "sequence_sum", limit=20.0)),
    ),
    (
        {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
        verl("vanilla", DUAL, advantage=adv.VerlAdvantage("grpo", False, 1.0)),
    ),
    (
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9},
        verl("vanilla", DUAL, advantage=adv.VerlAdvantage("reinforce_plus_plus", True, 0.9)),
    ),
]
ROWS = {"trl": TRL, "verl": VERL}
TRL_SEQUENCES = {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask", "use_vllm": True}
REFUSED = [
    ("trl", {"epsilon_high": 0.25, "delta": 1.2}, "delta below 1"),
    ("trl", {"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
    ("trl", TRL_SEQUENCES, "token_truncate or token_mask"),
    ("verl", {MODE: "dro"}, "needs a positive"),
    ("verl", {MODE: "dro", "actor.policy_loss.dro_beta": 0}, "needs a positive"),
    ("verl", {MODE: "geo_mean", IS: "token"}, "is not covered"),
    ("verl", {IS: "answer"}, "rollout_is must be one of"),
]


@pytest.mark.parametrize(("library", "row"), [(name, i) for name, rows in ROWS.items() for i in range(len(rows))])
def test_options_become_these_pieces(library, row):
    options, objective = ROWS[library][row]
    assert getattr(dialects, library)(options) == objective


@pytest.mark.parametrize(("library", "options", "reason"), REFUSED)
def test_what_is_not_covered_is_refused(library, options, reason):
    with pytest.raises(ValueError, match=reason):
        getattr(dialects, library)(options)
