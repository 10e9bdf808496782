"""Which components a recipe is made of, with the constants of its paper and with others."""

import inspect

import pytest

import rl_fn
from rl_fn import components as p
from rl_fn.objectives.recipes import __all__ as RECIPES

STD, NONE = p.GRPOAdvantage("group", 1e-6), p.GRPOAdvantage("none")
CLIP, HIGHER = p.PPOClip(0.2, 0.2), p.PPOClip(0.2, 0.28)
TOKENS, SUMS, ANSWERS = "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"
SMALL = (3e-4, 4e-4)
POSITIVE = p.Sum((HIGHER, p.PositiveExample(0.1)))
# Advantage, loss, aggregation; what else there is by default is in BESIDE.
DEFAULTS = {
    "cispo": (STD, p.CISPO(4.0), TOKENS),
    "clip_cov": (STD, p.ClipCov(2e-4, 1.0, 5.0, 0.2, 0.2), TOKENS),
    "dapo": (STD, HIGHER, TOKENS),
    "decoupled_ppo": (p.ReinforcePPAdvantage(1.0, 1e-8), p.DecoupledPPO(0.2, 0.2), TOKENS),
    "dppo": (NONE, p.DPPO(0.15, "tv"), SUMS),
    "dr_grpo": (NONE, CLIP, SUMS),
    "dro": (NONE, p.DRO(1.0), SUMS),
    "gdpo": (p.GDPOAdvantage(None, 1e-6), CLIP, ANSWERS),
    "gigpo": (p.GiGPOAdvantage(0.95, 1.0, "group", 1e-6), CLIP, ANSWERS),
    "gmpo": (STD, p.GMPO(0.4, 0.4), ANSWERS),
    "gpg": (p.GPGAdvantage(1.0), p.Reinforce(), TOKENS),
    "grpo": (STD, CLIP, ANSWERS),
    "grpo_passk": (p.GRPOPassKAdvantage(True, 1e-6), CLIP, TOKENS),
    "gspo": (STD, p.GSPO(*SMALL), ANSWERS),
    "gspo_token": (STD, p.GSPOToken(*SMALL), ANSWERS),
    "kimi": (NONE, p.Kimi(0.1), SUMS),
    "kl_cov": (STD, p.KLCov(2e-4, 1.0), TOKENS),
    "luspo": (STD, p.LUSPO(2e-3, 2.5e-3), ANSWERS),
    "m2po": (STD, p.Surrogate(), TOKENS),
    "maxrl": (p.MaxRLAdvantage(), p.Reinforce(), SUMS),
    "on_policy_distillation": (p.DistillationAdvantage(), p.Reinforce(), TOKENS),
    "opo": (p.OPOAdvantage(), p.Reinforce(), SUMS),
    "passk": (p.PassKAdvantage(4), HIGHER, TOKENS),
    "ppo": (p.GAE(1.0, 0.95, True), CLIP, TOKENS),
    "reinforce": (p.RawReward(0.0), p.Reinforce(), SUMS),
    "reinforce_pp": (p.ReinforcePPAdvantage(1.0, 1e-8), CLIP, TOKENS),
    "reinforce_pp_baseline": (p.ReinforcePPBaselineAdvantage(1e-8), CLIP, TOKENS),
    "remax": (p.ReMaxAdvantage(), p.Reinforce(), SUMS),
    "rloo": (p.RLOOAdvantage(), p.Reinforce(), SUMS),
    "sapo": (STD, p.SAPO(1.0, 1.05), ANSWERS),
    "topr": (p.RawReward(0.0), p.TOPR("sequence_sum"), SUMS),
    "vapo": (p.LengthAdaptiveGAE(1.0, 1.0, True, 0.05), POSITIVE, TOKENS),
    "vespo": (STD, p.VESPO(2.0, 3.0, 3.0, 2.0), TOKENS),
}
BESIDE = {
    "dapo": {"dynamic_sampling": p.DynamicSampling()},
    "grpo": {"kl": p.KL("k3", 0.04)},
    "m2po": {"correction": p.M2POMask(0.04)},
    "ppo": {"value": p.ValueLoss()},
    "vapo": {"value": p.ValueLoss()},
}
CRITIC = {"gamma": 0.9, "whiten": False, "clip_low": 0.1, "clip_high": 0.3}
CLIPS = {"clip_low": 0.1, "clip_high": 0.3}
CHANGED = [
    (
        "cispo",
        {"eps": 0.1, "clip_high": 2, "clip_low": 0.3},
        p.GRPOAdvantage("group", 0.1),
        p.CISPO(2.0, 0.3),
    ),
    ("dapo", {"eps": 0.1, **CLIPS}, p.GRPOAdvantage("group", 0.1), p.PPOClip(0.1, 0.3)),
    (
        "decoupled_ppo",
        {"gamma": 0.9, "weight_cap": 3, **CLIPS},
        p.ReinforcePPAdvantage(0.9),
        p.DecoupledPPO(0.1, 0.3, None, 3.0),
    ),
    (
        "dppo",
        {"threshold": 0.3, "divergence": "kl", "ratio_cap": 3, "behaviour": "old"},
        NONE,
        p.DPPO(0.3, "kl", 3.0, behaviour="old"),
    ),
    ("gdpo", {"weights": [1.0, 2.0]}, p.GDPOAdvantage((1.0, 2.0)), CLIP),
    ("gigpo", {"gamma": 0.5, "weight": 2, "scale": "none"}, p.GiGPOAdvantage(0.5, 2.0, "none", 1e-6), CLIP),
    ("gpg", {"norm": 2, "alpha": "nonzero"}, p.GPGAdvantage(2.0, "nonzero"), p.Reinforce()),
    ("grpo", {"scale": "batch", "eps": 0, "clip_low": 0.3}, p.GRPOAdvantage("batch", 0.0), p.PPOClip(0.3, 0.2)),
    ("grpo_passk", {"divide_by_std": False}, p.GRPOPassKAdvantage(False), CLIP),
    ("ppo", {"lam": 0.8, **CRITIC}, p.GAE(0.9, 0.8, False), p.PPOClip(0.1, 0.3)),
    (
        "vapo",
        {"critic_lam": 0.8, "lam_alpha": 0.5, "positive_coef": 0.0, **CRITIC},
        p.LengthAdaptiveGAE(0.9, 0.8, False, 0.5),
        p.PPOClip(0.1, 0.3),
    ),
    ("vapo", {"positive_coef": 2}, p.LengthAdaptiveGAE(), p.Sum((HIGHER, p.PositiveExample(2.0)))),
]


@pytest.mark.parametrize("name", RECIPES)
def test_defaults_are_these_pieces(name):
    advantage, loss, mode = DEFAULTS[name]
    expected = rl_fn.Objective(name, advantage, loss, p.Aggregation(mode), **BESIDE.get(name, {}))
    assert getattr(rl_fn.recipes, name)() == expected


@pytest.mark.parametrize(("name", "arguments", "advantage", "loss"), CHANGED)
def test_arguments_become_constants_of_pieces(name, arguments, advantage, loss):
    objective = getattr(rl_fn.recipes, name)(**arguments)
    assert (objective.advantage, objective.loss) == (advantage, loss)


SHARED = ("kl_estimator", "entropy_coef", "correction_cap", "reward_kl_coef", "dual_clip", "value_clip")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_constants_of_its_paper_alone(name):
    """What every recipe could have is set by replace; GRPO's paper has a KL penalty."""
    taken = set(inspect.signature(getattr(rl_fn.recipes, name)).parameters)
    assert not taken & set(SHARED) and ("kl_coef" in taken) == (name == "grpo")


def test_terms_are_replaced():
    plain = rl_fn.recipes.rloo()
    assert (plain.kl, plain.entropy, plain.correction, plain.reward_kl) == (None, None, None, None)
    assert rl_fn.recipes.grpo(kl_coef=0.0).kl is None and rl_fn.recipes.grpo(kl_coef=2).kl == p.KL("k3", 2.0)
    terms = {"kl": p.KL("k1+", 2.0), "entropy": p.EntropyBonus(0.3), "correction": p.TIS(3.0)}
    objective = plain.replace(**terms)
    assert {name: getattr(objective, name) for name in terms} == terms
    assert objective.replace(**dict.fromkeys(terms)) == plain
    assert rl_fn.recipes.m2po(threshold=0.3).correction == p.M2POMask(0.3)


def test_a_horizon_divides_the_sums():
    assert rl_fn.recipes.dr_grpo(max_completion_length=16).aggregation == p.Aggregation("seq-mean-token-sum-norm", 16.0)
