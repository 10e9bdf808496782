"""Every component, with constants that are not the defaults, is the independent float64 version of its equation.

A component without a row here fails the first test.
"""

import numpy as np
import pytest

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.rl_fn.component_table import ADVANTAGES, CORRECTIONS, LOSSES
from tests.rl_fn.recipe_batches import advantages, batch, rollouts

BATCH = batch(rl_fn.recipes.dapo(), 21)
OLD = BATCH[:4]
SAMPLED = (BATCH.logprobs, BATCH.rollout_logprobs, BATCH.advantages, BATCH.mask)
WEIGHT = BATCH.old_logprobs - BATCH.rollout_logprobs
CLIPS = {"clip_low": 0.11, "clip_high": 0.17, "dual_clip": 1.5}
CLIP = ORACLE["ppo_clip"](*OLD, **CLIPS)
OPEN = {"clip_low": 1.0, "clip_high": 1e30}
COV = {"fraction": 0.2, "cov_low": 0.1, "cov_high": 4.0, "clip_low": 0.1, "clip_high": 0.3}
BUMP = {"k_pos": 1.5, "lambda_pos": 2.5, "k_neg": 2.0, "lambda_neg": 1.0}
NLL = -BATCH.logprobs * BATCH.correct * BATCH.mask


def of(name, arrays=OLD, **constants):
    return ORACLE[name](*arrays, **constants)


LOSS_VALUES = {
    "PPOClip": (rl_fn.components.PPOClip(0.11, 0.17, 1.5), CLIP),
    "Reinforce": (rl_fn.components.Reinforce(), ORACLE["reinforce"](BATCH.logprobs, BATCH.advantages, BATCH.mask)),
    "Surrogate": (rl_fn.components.Surrogate(), of("ppo_clip", **OPEN)),
    "DecoupledPPO": (rl_fn.components.DecoupledPPO(0.11, 0.17, 1.5, 1.1), np.minimum(np.exp(WEIGHT), 1.1) * CLIP),
    "CISPO": (rl_fn.components.CISPO(0.2, 0.1), of("cispo", clip_high=0.2, clip_low=0.1)),
    "SAPO": (rl_fn.components.SAPO(0.7, 1.3), of("sapo", tau_pos=0.7, tau_neg=1.3)),
    "DPPO": (
        rl_fn.components.DPPO(0.03, "kl", 1.2),
        of("dppo", SAMPLED, threshold=0.03, divergence="kl", ratio_cap=1.2),
    ),
    "DRO": (rl_fn.components.DRO(0.4), of("dro", beta=0.4, level="sequence_sum")),
    "Kimi": (rl_fn.components.Kimi(0.4, "token"), of("kimi", tau=0.4, level="token")),
    "ClipCov": (rl_fn.components.ClipCov(*COV.values()), of("clip_cov", (*OLD, BATCH.noise), **COV)),
    "KLCov": (rl_fn.components.KLCov(0.3, 0.5), of("kl_cov", fraction=0.3, coef=0.5)),
    "PositiveExample": (rl_fn.components.PositiveExample(0.2), 0.2 * NLL),
    "Sum": (
        rl_fn.components.Sum((rl_fn.components.PPOClip(0.11, 0.17, 1.5), rl_fn.components.PositiveExample(0.2))),
        CLIP + 0.2 * NLL,
    ),
    "GSPO": (rl_fn.components.GSPO(0.11, 0.17, 1.5), of("gspo", **CLIPS)),
    "GSPOToken": (rl_fn.components.GSPOToken(0.11, 0.17, 1.5), of("gspo_token", **CLIPS)),
    "LUSPO": (rl_fn.components.LUSPO(0.11, 0.17, 1.5), of("luspo", **CLIPS)),
    "GMPO": (rl_fn.components.GMPO(0.1, 0.2), of("gmpo", clip_low=0.1, clip_high=0.2)),
    "VESPO": (rl_fn.components.VESPO(*BUMP.values()), of("vespo", SAMPLED, **BUMP)),
    "TOPR": (rl_fn.components.TOPR("sequence"), of("topr", SAMPLED, level="sequence")),
}
DRIFT = (BATCH.advantages, BATCH.logprobs, BATCH.rollout_logprobs, BATCH.mask)
WEIGHTS = {
    "TIS": (
        rl_fn.components.TIS(1.1, "sequence"),
        of("truncated_importance_weights", (WEIGHT, BATCH.mask), cap=1.1, level="sequence"),
    ),
    "IcePop": (
        rl_fn.components.IcePop(0.9, 1.1),
        of("masked_importance_weights", (WEIGHT, BATCH.mask), low=0.9, high=1.1),
    ),
    "Rejection": (
        rl_fn.components.Rejection(0.1, "k1", "seq_max"),
        of("rejection_mask", (WEIGHT, BATCH.mask), threshold=0.1, statistic="k1", level="seq_max"),
    ),
    "M2POMask": (
        rl_fn.components.M2POMask(0.02),
        of("second_moment_mask", (BATCH.logprobs - BATCH.old_logprobs, BATCH.mask), threshold=0.02),
    ),
    "OffPolicySequenceMask": (
        rl_fn.components.OffPolicySequenceMask(-0.1),
        of("off_policy_sequence_mask", DRIFT, threshold=-0.1),
    ),
    "VACOMask": (rl_fn.components.VACOMask(0.05), of("total_variation_mask", DRIFT, threshold=0.05)),
    "HighEntropyMask": (
        rl_fn.components.HighEntropyMask(0.5),
        of("high_entropy_mask", (BATCH.entropies, BATCH.mask), quantile=0.5),
    ),
    "Product": (
        rl_fn.components.Product((rl_fn.components.TIS(1.1), rl_fn.components.HighEntropyMask(0.5))),
        of("truncated_importance_weights", (WEIGHT, BATCH.mask), cap=1.1)
        * of("high_entropy_mask", (BATCH.entropies, BATCH.mask), quantile=0.5),
    ),
}


def on_tokens(per_answer, mask):
    return np.where(mask, np.asarray(per_answer)[..., None], 0.0)


def last(rewards, mask):
    """The reward on the last counted token of each completion."""
    out = np.zeros(mask.shape)
    for place in np.ndindex(rewards.shape):
        counted = np.flatnonzero(mask[place])
        if len(counted):
            out[(*place, counted[-1])] = rewards[place]
    return out


def completions(name, **constants):
    return lambda r, values: on_tokens(ORACLE[name](r.rewards, **constants), r.mask)


def adaptive(r, values):
    """Advantages with a λ per row; one row at a time, as the oracle's λ is a number."""
    token, lengths = last(r.rewards, r.mask), r.mask.sum(-1)
    lam = np.where(lengths > 0, np.maximum(1.0 - 1.0 / (0.5 * np.maximum(lengths, 1)), 0.0), 0.0)
    return np.stack(
        [
            [ORACLE["gae"](token[p, g], values[p, g], r.mask[p, g], gamma=0.9, lam=lam[p, g])[0] for g in range(4)]
            for p in range(2)
        ]
    )


TWO = np.array([0.5, 2.0], np.float32)
STEP = {"gamma": 0.8, "weight": 0.6, "scale": "none", "eps": 1e-3}
ADVANTAGE_VALUES = {
    "GRPOAdvantage": (
        rl_fn.components.GRPOAdvantage("batch", 0.1),
        completions("grpo_advantages", scale="batch", eps=0.1),
    ),
    "RLOOAdvantage": (rl_fn.components.RLOOAdvantage(), completions("rloo_advantages")),
    "RawReward": (rl_fn.components.RawReward(0.3), lambda r, values: on_tokens(r.rewards - 0.3, r.mask)),
    "GPGAdvantage": (
        rl_fn.components.GPGAdvantage(2.0, "nonzero"),
        completions("gpg_advantages", norm=2.0, alpha="nonzero"),
    ),
    "MaxRLAdvantage": (rl_fn.components.MaxRLAdvantage(), completions("maxrl_advantages")),
    "PassKAdvantage": (rl_fn.components.PassKAdvantage(2), completions("passk_analytic_advantages", k=2)),
    "GRPOPassKAdvantage": (rl_fn.components.GRPOPassKAdvantage(False), completions("passk_advantages", scale=False)),
    "OPOAdvantage": (
        rl_fn.components.OPOAdvantage(),
        lambda r, values: on_tokens(ORACLE["opo_advantages"](r.rewards, r.mask.sum(-1)), r.mask),
    ),
    "ReMaxAdvantage": (
        rl_fn.components.ReMaxAdvantage(),
        lambda r, values: on_tokens(ORACLE["remax_advantages"](r.rewards, r.greedy_rewards), r.mask),
    ),
    "ReinforcePPAdvantage": (
        rl_fn.components.ReinforcePPAdvantage(0.9, 0.1),
        lambda r, values: ORACLE["reinforce_pp_advantages"](last(r.rewards, r.mask), r.mask, gamma=0.9, eps=0.1),
    ),
    "ReinforcePPBaselineAdvantage": (
        rl_fn.components.ReinforcePPBaselineAdvantage(0.1),
        lambda r, values: ORACLE["reinforce_pp_baseline_advantages"](r.rewards, r.mask, eps=0.1),
    ),
    "GDPOAdvantage": (
        rl_fn.components.GDPOAdvantage((0.5, 2.0), 0.1),
        lambda r, values: on_tokens(ORACLE["gdpo_advantages"](r.rewards, TWO, eps=0.1), r.mask),
    ),
    "GiGPOAdvantage": (
        rl_fn.components.GiGPOAdvantage(*STEP.values()),
        lambda r, values: on_tokens(
            ORACLE["step_group_advantages"](r.rewards, r.state_ids, r.mask.any(-1), **STEP), r.mask
        ),
    ),
    "DistillationAdvantage": (
        rl_fn.components.DistillationAdvantage(0.2),
        lambda r, values: ORACLE["distillation_advantages"](r.old_logprobs, r.teacher_logprobs, r.mask, clip=0.2),
    ),
    "GAE": (
        rl_fn.components.GAE(0.9, 0.8, whiten=False),
        lambda r, values: ORACLE["gae"](last(r.rewards, r.mask), values, r.mask, gamma=0.9, lam=0.8)[0],
    ),
    "LengthAdaptiveGAE": (rl_fn.components.LengthAdaptiveGAE(0.9, 0.7, False, 0.5), adaptive),
}


def test_every_piece_has_a_row():
    assert LOSS_VALUES.keys() == LOSSES.keys()
    assert WEIGHTS.keys() == CORRECTIONS.keys() - {"none"}
    assert ADVANTAGE_VALUES.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", LOSS_VALUES | WEIGHTS)
def test_a_loss_or_a_weight_is_its_equation(name):
    component, expected = (LOSS_VALUES | WEIGHTS)[name]
    got = np.asarray(component(BATCH))
    assert got.any() and got.dtype == np.float32
    np.testing.assert_allclose(
        np.where(BATCH.mask, got, 0.0), np.where(BATCH.mask, expected, 0.0), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("name", ADVANTAGE_VALUES)
def test_an_advantage_is_its_equation(name):
    component, expected = ADVANTAGE_VALUES[name]
    objective = rl_fn.recipes.dapo().replace(advantage=component, dynamic_sampling=None)
    read = rollouts(objective, 22)
    got = np.asarray(advantages(objective, read))
    assert got.any()
    np.testing.assert_allclose(got, expected(read, read.values), rtol=1e-4, atol=1e-5)


def test_the_critic_of_vapo_has_a_lambda_of_its_own():
    objective = rl_fn.recipes.vapo(gamma=0.9, critic_lam=0.7)
    read = rollouts(objective, 22)
    token = last(read.rewards, read.mask).astype(np.float32)
    expected = ORACLE["gae"](token, read.values, read.mask, gamma=0.9, lam=0.7)[1]
    np.testing.assert_allclose(objective.advantages(read).returns, expected, rtol=1e-4, atol=1e-5)


def test_behaviour_chooses_the_policy_under_the_ratio():
    got = rl_fn.components.VESPO(behaviour="old")(BATCH)
    np.testing.assert_allclose(got, np.where(BATCH.mask, of("vespo"), 0.0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("term", "kind"), [("kl", rl_fn.components.KL), ("entropy", rl_fn.components.EntropyBonus)])
def test_a_refused_coefficient_names_its_term(term, kind):
    with pytest.raises(ValueError, match=rf"^{term}\.coef must not be negative, got -1\.0"):
        kind(coef=-1.0)
