"""The constants of components: defaults, what is refused and what on the boundary is not, and what they declare."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rl_fn
from rl_fn import components
from rl_fn.aggregation import MODES
from rl_fn.objectives.batch import Batch

KINDS = [
    getattr(components, name)
    for name in components.__all__
    if dataclasses.is_dataclass(getattr(components, name)) and name not in ("Custom", "CustomAdvantage")
]
# Values for the fields that have no default.
REQUIRED: dict[str, dict[str, Any]] = {
    "KL": {},
    "Aggregation": {"mode": "token-mean"},
    "EntropyBonus": {"coef": 0.1},
    "Rejection": {"threshold": 0.5},
    "OffPolicySequenceMask": {"threshold": 0.5},
    "VACOMask": {"threshold": 0.5},
    "Sum": {"parts": (rl_fn.components.Reinforce(),)},
    "Product": {"parts": (rl_fn.components.M2POMask(),)},
}
SMALL = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}
BUMP = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0, "behaviour": "rollout"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Aggregation": {"max_completion_length": None},
    "KL": {"estimator": "k3", "coef": 0.0},
    "ValueLoss": {"clip": None},
    "DynamicSampling": {"low": None, "high": None},
    "PPOClip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "DecoupledPPO": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "weight_cap": None},
    "CISPO": {"clip_high": 4.0, "clip_low": None},
    "SAPO": {"tau_pos": 1.0, "tau_neg": 1.05},
    "DPPO": {"threshold": 0.15, "divergence": "tv", "ratio_cap": None, "behaviour": "rollout"},
    "DRO": {"beta": 1.0, "level": "sequence_sum"},
    "Kimi": {"tau": 0.1, "level": "sequence_sum"},
    "ClipCov": {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "clip_low": 0.2, "clip_high": 0.2},
    "KLCov": {"fraction": 2e-4, "coef": 1.0},
    "PositiveExample": {"coef": 0.1},
    "GSPO": SMALL,
    "GSPOToken": SMALL,
    "LUSPO": {"clip_low": 2e-3, "clip_high": 2.5e-3, "dual_clip": None},
    "GMPO": {"clip_low": 0.4, "clip_high": 0.4},
    "VESPO": BUMP,
    "TOPR": {"level": "sequence_sum", "behaviour": "rollout"},
    "TIS": {"cap": 2.0, "level": "token"},
    "IcePop": {"low": 0.5, "high": 5.0, "level": "token"},
    "Rejection": {"statistic": "k3", "level": "token"},
    "M2POMask": {"threshold": 0.04},
    "HighEntropyMask": {"quantile": 0.8},
    "ReinforcePPAdvantage": {"gamma": 1.0, "eps": 1e-8},
    "ReinforcePPBaselineAdvantage": {"eps": 1e-8},
    "GDPOAdvantage": {"weights": None, "eps": 1e-6},
    "GiGPOAdvantage": {"gamma": 0.95, "weight": 1.0, "scale": "group", "eps": 1e-6},
    "DistillationAdvantage": {"clip": None},
    "GAE": {"gamma": 1.0, "lam": 0.95, "whiten": True},
    "LengthAdaptiveGAE": {"gamma": 1.0, "lam": 1.0, "whiten": True, "alpha": 0.05},
    "GRPOAdvantage": {"scale": "group", "eps": 1e-6},
    "RawReward": {"baseline": 0.0},
    "GPGAdvantage": {"norm": 1.0, "alpha": "informative"},
    "PassKAdvantage": {"k": 4},
    "GRPOPassKAdvantage": {"scale": True, "eps": 1e-6},
}


def made(kind: str, **arguments: Any) -> Any:
    return getattr(rl_fn.components, kind)(**{**REQUIRED.get(kind, {}), **arguments})


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_defaults_are_these(kind):
    component, given = made(kind), REQUIRED.get(kind, {})
    names = [field.name for field in dataclasses.fields(component) if field.name not in given]
    assert {name: getattr(component, name) for name in names} == DEFAULTS.get(kind, {})


NOT_NEGATIVE, POSITIVE, UNIT = ([-0.01], [0.0]), ([0.0, -1.0], [0.01]), ([-0.01, 1.01], [0.0, 1.0])
CLIPPING, DUAL, NAME = ([-0.01], [0.0]), ([1.0, 0.5], [1.01, None]), (["nonsense"], [])
RANGES: list[tuple[str, str, tuple[list[Any], list[Any]]]] = [
    *((kind, field, NOT_NEGATIVE) for kind in ("PPOClip", "DecoupledPPO") for field in ("clip_low", "clip_high")),
    *((kind, "dual_clip", DUAL) for kind in ("PPOClip", "DecoupledPPO")),
    *(
        (kind, field, CLIPPING)
        for kind in ("GSPO", "GSPOToken", "LUSPO", "GMPO")
        for field in ("clip_low", "clip_high")
    ),
    *((kind, "dual_clip", DUAL) for kind in ("GSPO", "GSPOToken", "LUSPO")),
    *(
        (kind, "eps", NOT_NEGATIVE)
        for kind in ("ReinforcePPAdvantage", "ReinforcePPBaselineAdvantage", "GDPOAdvantage", "GiGPOAdvantage")
    ),
    *((kind, "eps", NOT_NEGATIVE) for kind in ("GRPOAdvantage", "GRPOPassKAdvantage")),
    *((kind, "gamma", UNIT) for kind in ("ReinforcePPAdvantage", "GiGPOAdvantage", "GAE", "LengthAdaptiveGAE")),
    *((kind, "lam", UNIT) for kind in ("GAE", "LengthAdaptiveGAE")),
    *((kind, "scale", NAME) for kind in ("GRPOAdvantage", "GiGPOAdvantage")),
    *((kind, "coef", NOT_NEGATIVE) for kind in ("KL", "EntropyBonus", "PositiveExample", "KLCov")),
    *((kind, "level", NAME) for kind in ("TIS", "IcePop", "Rejection", "TOPR", "DRO")),
    *((kind, "threshold", POSITIVE) for kind in ("Rejection", "M2POMask", "VACOMask", "DPPO")),
    *((kind, "behaviour", (["new"], ["old", "rollout"])) for kind in ("DPPO", "VESPO", "TOPR")),
    *((kind, "clip", ([0.0, -1.0], [0.01, None])) for kind in ("ValueLoss", "DistillationAdvantage")),
    ("DecoupledPPO", "weight_cap", ([0.0, -1.0], [0.01, None])),
    ("TIS", "cap", POSITIVE),
    ("IcePop", "low", ([-0.01, 5.0, 5.1], [0.0, 4.9])),
    ("HighEntropyMask", "quantile", UNIT),
    ("LengthAdaptiveGAE", "alpha", POSITIVE),
    ("GPGAdvantage", "norm", POSITIVE),
    ("GPGAdvantage", "alpha", (["all"], ["informative", "nonzero", "none"])),
    ("PassKAdvantage", "k", ([0, -1], [1])),
    ("KL", "estimator", (["k4"], ["k1", "k2", "k3", "abs", "k1+", "k3+"])),
    (
        "Aggregation",
        "mode",
        (["mean", "seq-mean-token-sum-norm"], [x for x in MODES if x != "seq-mean-token-sum-norm"]),
    ),
    ("Aggregation", "max_completion_length", ([1.0], [None])),
    ("Sum", "parts", ([()], [(rl_fn.components.Reinforce(),)])),
    (
        "Product",
        "parts",
        ([(), (rl_fn.components.TIS(),) * 2], [(rl_fn.components.TIS(),)]),
    ),
]


@pytest.mark.parametrize(("kind", "field", "legal"), RANGES)
def test_the_bounds_of_a_constant(kind, field, legal):
    for value in legal[0]:
        with pytest.raises(ValueError, match=r"must|need"):
            made(kind, **{field: value})
    for value in legal[1]:
        assert getattr(made(kind, **{field: value}), field) == value


def test_the_horizon_of_a_norm_is_positive():
    for max_completion_length in (0.0, -1.0):
        with pytest.raises(ValueError, match="max_completion_length must be positive"):
            rl_fn.components.Aggregation("seq-mean-token-sum-norm", max_completion_length)
    assert rl_fn.components.Aggregation("seq-mean-token-sum-norm", 0.5).max_completion_length == 0.5


ROLLOUT, SUMS = ("rollout_logprobs",), ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
BY_SEQUENCE = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# What a component says where it is not the rule of its slot.
SAYS: dict[str, dict[str, Any]] = {
    "DecoupledPPO": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "DPPO": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "VESPO": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "TOPR": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "DRO": {"gradient_without_advantage": True, "modes": SUMS},
    "Kimi": {"gradient_without_advantage": True, "modes": SUMS},
    "ClipCov": {"over_batch": True},
    "KLCov": {"over_batch": True, "gradient_without_advantage": True},
    "PositiveExample": {"gradient_without_advantage": True, "required_fields": ("correct",)},
    "GSPO": {"sequence_level": True, "modes": BY_SEQUENCE},
    "GMPO": {"sequence_level": True, "modes": BY_SEQUENCE},
    "LUSPO": {"sequence_level": True, "modes": ("seq-mean-token-mean",)},
    "TIS": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "IcePop": {"weighs_rollout": True, "required_fields": ROLLOUT},
    "Rejection": {"required_fields": ROLLOUT},
    "OffPolicySequenceMask": {"required_fields": ROLLOUT},
    "VACOMask": {"required_fields": ROLLOUT},
    "M2POMask": {"over_batch": True},
    "HighEntropyMask": {"over_batch": True, "required_fields": ("entropies",)},
    "ReMaxAdvantage": {"required_fields": ("rewards", "greedy_rewards")},
    "ReinforcePPAdvantage": {"token_rewards": True},
    "MaxRLAdvantage": {"takes_penalty": False, "nonnegative_rewards": True},
    "GDPOAdvantage": {"rewards_shape": "*batch R G", "takes_penalty": False},
    "GiGPOAdvantage": {
        "required_fields": ("rewards", "state_ids"),
        "rewards_shape": "*batch G S",
        "takes_penalty": False,
    },
    "DistillationAdvantage": {
        "required_fields": ("old_logprobs", "teacher_logprobs"),
        "rewards_shape": "none",
        "per_token": True,
        "takes_penalty": False,
    },
}
CRITIC = {"required_fields": ("rewards", "values"), "per_token": True, "critic": True, "token_rewards": True}
SAYS |= {"GAE": {**CRITIC, "accepts_packed": True}, "LengthAdaptiveGAE": CRITIC}
FLAGS = ("over_batch", "gradient_without_advantage", "weighs_rollout", "sequence_level")
RULE = {"required_fields": (), "accepts_packed": True, **dict.fromkeys(FLAGS, False)}
# Of what nothing is known: no row is lost, no statistic is cut, no packed rows are mixed.
UNKNOWN = {**RULE, "accepts_packed": False, "over_batch": True, "gradient_without_advantage": True}
OF_ADVANTAGES = {
    "required_fields": ("rewards",),
    "rewards_shape": "*batch G",
    "takes_penalty": True,
    **dict.fromkeys(("per_token", "critic", "token_rewards", "nonnegative_rewards", "accepts_packed"), False),
}


def said(component: Any) -> dict[str, Any]:
    if isinstance(component, components.Advantage):
        return {name: getattr(component, name) for name in OF_ADVANTAGES}
    rule = {name: getattr(component, name) for name in RULE}
    return rule if set(component.modes) == set(MODES) else {**rule, "modes": component.modes}


@pytest.mark.parametrize(
    "kind",
    [kind.__name__ for kind in KINDS if issubclass(kind, components.PerToken | components.Advantage)],
)
def test_what_a_component_says_of_itself(kind):
    one = made(kind)
    if kind in ("Sum", "Product"):
        assert said(one) == said(one.parts[0])
        return
    rule = OF_ADVANTAGES if isinstance(one, components.Advantage) else RULE
    assert said(one) == {**rule, **SAYS.get(kind, {})}


def test_advantages_take_groups_of_any_size_and_failed_completions():
    kinds = [kind for kind in KINDS if issubclass(kind, components.Advantage)]
    for flag in ("takes_valid", "takes_group_ids"):
        assert {kind.__name__ for kind in kinds if not getattr(kind, flag)} <= {"Advantage", "CustomAdvantage"}


def test_of_what_nothing_is_known():
    of_batch = components.Custom(lambda b: b.logprobs)
    assert said(of_batch) == said(rl_fn.components.Sum((lambda b: b.logprobs,))) == UNKNOWN
    assert said(components.Custom(len, over_batch=False)) == {**UNKNOWN, "over_batch": False}
    assert said(components.CustomAdvantage(len)) == OF_ADVANTAGES
    assert said(components.Advantage()) == {**OF_ADVANTAGES, "per_token": True, "takes_penalty": False}


def test_what_depends_on_a_constant():
    for kind in ("DPPO", "VESPO", "TOPR"):
        assert said(made(kind, behaviour="old")) == RULE
    for kind in ("DRO", "Kimi"):
        assert said(made(kind, level="token")) == {**RULE, "gradient_without_advantage": True}
    assert components.ValueLoss().required_fields == ("values", "returns")
    assert components.ValueLoss(0.5).required_fields == ("values", "returns", "old_values")
    assert made("ReinforcePPAdvantage", gamma=0.99).per_token and not made("ReinforcePPAdvantage").per_token


@pytest.mark.parametrize("kind", ["GSPO", "PositiveExample", "KLCov", "DPPO", "DRO", "PPOClip"])
def test_a_sum_is_what_one_of_its_losses_is(kind):
    one = made(kind)
    both = said(rl_fn.components.Sum((rl_fn.components.Reinforce(), one)))
    assert {**both, "modes": set(both.get("modes", MODES))} == {**said(one), "modes": set(one.modes)}
    assert rl_fn.components.Sum((rl_fn.components.DRO(), rl_fn.components.GSPO())).modes == (
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    )


@pytest.mark.parametrize("kind", ["TIS", "HighEntropyMask", "OffPolicySequenceMask", "M2POMask"])
def test_a_product_is_what_one_of_its_factors_is(kind):
    one = made(kind)
    assert said(rl_fn.components.Product((rl_fn.components.OffPolicySequenceMask(0.5), one))) == {
        **said(one),
        "required_fields": tuple(dict.fromkeys([*ROLLOUT, *one.required_fields])),
    }


def test_plain_functions_in_a_sum_and_a_product():
    x, mask = jnp.array([[2.0, 3.0]]), jnp.ones((1, 2), bool)
    assert rl_fn.components.Product((lambda b: b.logprobs, lambda b: b.advantages))(Batch(x, x, x, mask)).tolist() == [
        [4.0, 9.0]
    ]
    assert rl_fn.components.Sum((lambda b: b.logprobs, lambda b: b.advantages))(Batch(x, x, x, mask)).tolist() == [
        [4.0, 6.0]
    ]


WEIGHING = {"M2POMask": {}, "OffPolicySequenceMask": {"threshold": -1.0}, "VACOMask": {"threshold": 0.01}}


@pytest.mark.parametrize("kind", [*WEIGHING, "HighEntropyMask"])
def test_a_mask_has_no_gradient(kind):
    x, mask = jnp.array([[-1.0, -2.0, -0.5]]), jnp.ones((1, 3), bool)
    of = Batch(x, x - 0.1, x, mask, rollout_logprobs=x - 0.2, entropies=-x)

    def total(y):
        return jnp.sum(made(kind, **WEIGHING.get(kind, {}))(of._replace(logprobs=y, entropies=-y)))

    value, gradient = jax.value_and_grad(total)(x)
    assert jnp.isfinite(value) and not gradient.any()
