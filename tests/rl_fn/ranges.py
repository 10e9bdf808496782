"""The range of every number that is refused somewhere: by function, by constructor, of sampling."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

# Refused, and accepted: both sides of every boundary.
Range = tuple[Sequence[Any], Sequence[Any]]
POSITIVE: Range = (0.0, -1.0), (0.01,)
NOT_NEGATIVE: Range = (-0.01,), (0.0,)
UNIT: Range = (-0.01, 1.01), (0.0, 1.0)
INSIDE: Range = (0.0, 1.0), (0.01, 0.99)
SMOOTHING: Range = (-0.01, 0.5), (0.0, 0.49)
AT_LEAST_ONE: Range = (0, -1), (1,)
UNKNOWN: Range = ("nonsense",), ()

RANGES: list[tuple[str, str, Range, str]] = []
SMOOTHED = ("dpo", "dpo_robust", "dpo_norm", "f_dpo", "rpo", "cpo", "aot", "aot_unpaired")
WITH_BETA = (*SMOOTHED, "ipo", "hinge", "sppo", "discopop", "exo", "nca", "bco", "apo_zero", "apo_down", "simpo", "tpo")


def _add(legal: Range, message: str, **arguments: str) -> None:
    """function="argument argument": the same rule for each."""
    for name, listed in arguments.items():
        RANGES.extend((name, argument, legal, f"{argument} {message}".strip()) for argument in listed.split())


_add(UNIT, "must be in", discounted_returns="gamma", gae="gamma lam", td_lambda="gamma lam", n_step="gamma")
_add(UNIT, "must be in", vtrace="gamma lam", retrace="gamma lam", clipped_importance_advantages="gamma clip_low")
_add(UNIT, "must be", gkd="beta", top_k_distillation="beta", f_dpo="alpha", smooth_scales="alpha")
_add(UNIT, "must be in", sppo="chosen_win_rate rejected_win_rate")
_add(UNIT, "must be", clip_cov="fraction", kl_cov="fraction", high_entropy_mask="quantile")
_add(INSIDE, "must be in", jensen_shannon="beta")
_add(POSITIVE, "must be positive", length_adaptive_lambda="alpha", gpg_advantages="norm", dppo="threshold ratio_cap")
_add(POSITIVE, "must be positive", rejection_mask="threshold", second_moment_mask="threshold")
_add(POSITIVE, "must be positive", total_variation_mask="threshold", truncated_importance_weights="cap")
_add(POSITIVE, "must be positive", decoupled_ppo="weight_cap", value_clip="clip", value_huber="delta")
_add(POSITIVE, "must be positive", dro="beta", kimi="tau", kl_importance_corrected="log_clip", retrace="c_clip")
_add(POSITIVE, "must be positive", gkd="temperature", top_k_distillation="temperature", distillation_advantages="clip")
_add(POSITIVE, "must be positive", on_policy_distillation="clip", logits_logprobs="temperature softcap")
_add(POSITIVE, "must be positive", row_state="temperature softcap", linear_logprobs="temperature softcap")
_add(POSITIVE, "must be positive", kto="beta", preference_metrics="beta")
_add(POSITIVE, "must be positive", **dict.fromkeys(WITH_BETA, "beta"))
_add(SMOOTHING, "must be in", **dict.fromkeys(SMOOTHED, "label_smoothing"))
_add(POSITIVE, "must be positive", discopop="tau")
_add(((0.0, 0.5), (0.01, 0.49)), "must be in", exo="label_smoothing")
_add(NOT_NEGATIVE, "must not be negative", whiten="eps", grpo_advantages="eps", gdpo_advantages="eps")
_add(NOT_NEGATIVE, "must not be negative", passk_advantages="eps", step_group_advantages="eps", kl_cov="coef")
_add(NOT_NEGATIVE, "must not be negative", rpo="alpha", orpo="lam", cpo="alpha", tpo="alpha", bradley_terry="center")
_add(NOT_NEGATIVE, "must not be negative", tchebycheff="rho", cispo="clip_high clip_low")
_add(NOT_NEGATIVE, "must not be negative", clipped_importance_advantages="clip_high")
_add(((-1,), (0,)), "must not be negative", masked_var="ddof")
_add(AT_LEAST_ONE, "must be at least 1", n_step="n", linear_logprobs="chunk", quantize_fp8="block")
_add(((126.9, 128.1), (127, 128)), "must be within", quantize_int8="half_range")
_add(((-1, 21), (0, 20)), "must be between 0", overlong_penalty="buffer")
_add(UNKNOWN, "must be one of", grpo_advantages="scale", step_group_advantages="scale", gpg_advantages="alpha")
_add(UNKNOWN, "must be one of", rejection_mask="statistic level", log_ratio="level", dppo="divergence", topr="level")
_add(UNKNOWN, "must be one of", truncated_importance_weights="level", masked_importance_weights="level")
_add((("sequence",), ("token", "sequence_sum")), "must be one of", dro="level", kimi="level")
_add(UNKNOWN, "must be one of", quantize_fp8="granularity")

# One rule for several arguments: the message names them together.
for _name in ("ppo_clip", "clipped_tokens", "decoupled_ppo", "gspo", "gspo_token", "luspo", "gmpo"):
    RANGES += [(_name, argument, NOT_NEGATIVE, "clips must not be negative") for argument in ("clip_low", "clip_high")]
for _name in ("ppo_clip", "clipped_tokens", "decoupled_ppo", "gspo", "gspo_token", "luspo"):
    RANGES.append((_name, "dual_clip", ((1.0, 0.5), (1.01,)), "dual_clip must exceed 1"))
RANGES += [("vespo", x, NOT_NEGATIVE, "λ must not be negative") for x in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")]
RANGES += [("sapo", x, POSITIVE, "τ must be positive") for x in ("tau_pos", "tau_neg")]
RANGES += [("vtrace", x, POSITIVE, "clips must be positive") for x in ("rho_clip", "c_clip")]
RANGES += [("kto", x, NOT_NEGATIVE, "weights must not be") for x in ("desirable_weight", "undesirable_weight")]
RANGES += [("masked_importance_weights", "low", ((-0.01, 3.0, 3.1), (0.0, 2.9)), "need 0 ≤ low < high")]
RANGES += [("clip_cov", "cov_low", ((9.0, 9.1), (8.9,)), "need cov_low < cov_high")]
RANGES += [("group_filter", "low", ((9.0, 9.1), (8.9,)), "need low < high")]

# Together with the argument under test, where the case's own value would decide.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("clip_cov", "cov_low"): {"cov_high": 9.0},
    ("group_filter", "low"): {"high": 9.0},
}

LAGRANGIAN = {"limits": [1.0], "directions": ["<="], "lr": 0.1}
SCHEDULE = {"kind": "linear", "start": 1.0, "end": 0.5, "steps": 10}
WARM = {**SCHEDULE, "kind": "warmup_cosine", "warmup": 3}
EXPONENTIAL = {**SCHEDULE, "kind": "exponential"}
TARGET = {"target": 0.1}
# Constructors: the other arguments, the one under test, its range, the message.
BUILT: list[tuple[str, dict[str, Any], str, Range, str]] = [
    ("fixed_kl", {}, "coef", NOT_NEGATIVE, "coef must not be negative"),
    ("exponential_kl", {}, "target", POSITIVE, "target must be positive"),
    ("exponential_kl", TARGET, "down", ((0.0, 1.01), (0.01, 1.0)), "need 0 < down"),
    ("exponential_kl", TARGET, "up", ((0.99,), (1.0, 1.01)), "need 0 < down"),
    ("exponential_kl", TARGET, "low", ((0.0,), (0.01,)), "low must be positive"),
    ("exponential_kl", {**TARGET, "low": 0.1, "high": 0.3}, "coef", ((0.09, 0.31), (0.1, 0.3)), "need low ≤ coef"),
    ("linear_kl", {}, "target", POSITIVE, "target must be positive"),
    ("linear_kl", {**TARGET, "samples": 0.01}, "horizon", ((0, -1), (0.5,)), "horizon and samples"),
    ("linear_kl", TARGET, "samples", ((0, -1), (0.5,)), "horizon and samples"),
    ("linear_kl", TARGET, "clip", ((0.0, 1.01), (0.01, 1.0)), "clip must be in"),
    ("linear_kl", {**TARGET, "clip": 0.5, "samples": 4}, "horizon", ((1.99,), (2,)), "need clip"),
    ("linear_kl", TARGET, "low", NOT_NEGATIVE, "low must not be negative"),
    ("linear_kl", {**TARGET, "low": 0.1, "high": 0.3}, "coef", ((0.09, 0.31), (0.1, 0.3)), "need low ≤ coef"),
    ("pid_kl", {}, "target", POSITIVE, "target must be positive"),
    ("pid_kl", TARGET, "kp", NOT_NEGATIVE, "gains must not be negative"),
    ("pid_kl", TARGET, "ki", NOT_NEGATIVE, "gains must not be negative"),
    ("pid_kl", TARGET, "kd", NOT_NEGATIVE, "gains must not be negative"),
    ("pid_kl", TARGET, "low", NOT_NEGATIVE, "need 0 ≤ low"),
    ("pid_kl", TARGET, "high", ((float("inf"),), (0.2,)), "a finite high"),
    ("pid_kl", {**TARGET, "low": 0.1, "high": 0.3}, "coef", ((0.09, 0.31), (0.1, 0.3)), "need low ≤ coef"),
    ("adaptive_entropy", {}, "target", POSITIVE, "target must be positive"),
    ("adaptive_entropy", TARGET, "step", POSITIVE, "step must be positive"),
    ("adaptive_entropy", TARGET, "low", NOT_NEGATIVE, "low must not be negative"),
    ("adaptive_entropy", {**TARGET, "low": 0.1, "high": 0.3}, "coef", ((0.09, 0.31), (0.1, 0.3)), "need low ≤ coef"),
    ("scheduled_kl", SCHEDULE, "kind", UNKNOWN, "kind must be one of"),
    ("scheduled_kl", SCHEDULE, "start", NOT_NEGATIVE, "start and end must not be negative"),
    ("scheduled_kl", SCHEDULE, "end", NOT_NEGATIVE, "start and end must not be negative"),
    ("scheduled_kl", SCHEDULE, "steps", AT_LEAST_ONE, "steps must be at least 1"),
    ("scheduled_kl", SCHEDULE, "warmup", ((1,), (0,)), "warmup belongs to"),
    ("scheduled_kl", EXPONENTIAL, "start", ((0.0,), (0.01,)), "an exponential never meets 0"),
    ("scheduled_kl", EXPONENTIAL, "end", ((0.0,), (0.01,)), "an exponential never meets 0"),
    ("scheduled_kl", WARM, "warmup", ((0, 10), (1, 9)), "need 0 < warmup < steps"),
    ("lagrangian", LAGRANGIAN, "lr", POSITIVE, "lr must be positive"),
    ("lagrangian", LAGRANGIAN, "penalty", NOT_NEGATIVE, "penalty must not be negative"),
    ("lagrangian", {**LAGRANGIAN, "high": 2.0}, "start", ((-0.01, 2.01), (0.0, 2.0)), "need 0 ≤ start ≤ high"),
    ("lagrangian", LAGRANGIAN, "directions", ((["<"], [], ["<=", "<="]), ([">="],)), "directions must be one of"),
    ("pareto_archive", {"objectives": 1, "maximize": True}, "capacity", AT_LEAST_ONE, "need capacity, objectives"),
    ("pareto_archive", {"capacity": 1, "maximize": True}, "objectives", AT_LEAST_ONE, "need capacity, objectives"),
]

# The parameter follows the logits (and what was seen): refused, then accepted.
SAMPLING = {
    "temperature": ((), (-0.01,), (0.0, 0)),
    "top_k": ((), (0, -1), (1,)),
    "top_p": ((), (0.0, 1.01), (0.01, 1.0)),
    "min_p": ((), (-0.01, 1.01), (0.0, 1.0)),
    "repetition_penalty": ((jnp.array([True, False, True]),), (0.0, -1.0), (0.01,)),
}
