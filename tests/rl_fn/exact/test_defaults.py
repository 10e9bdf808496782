"""The numeric and boolean defaults, in figures: a changed default is a changed algorithm."""

import inspect

import pytest

import rl_fn

INF = float("inf")
PPO = {"clip_low": 0.2, "clip_high": 0.2}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
DPO = {"beta": 0.1, "label_smoothing": 0.0}
DEFAULTS = {
    "discounted_returns": {"gamma": 1.0},
    "gae": {"gamma": 1.0, "lam": 1.0, "bootstrap": 0.0},
    "td_lambda": {"gamma": 1.0, "lam": 1.0, "bootstrap": 0.0},
    "length_adaptive_lambda": {"alpha": 0.05},
    "whiten": {"shift_mean": True, "eps": 1e-8},
    "n_step": {"gamma": 1.0, "bootstrap": 0.0},
    "vtrace": {"gamma": 1.0, "rho_clip": 1.0, "c_clip": 1.0, "lam": 1.0, "bootstrap": 0.0},
    "retrace": {"gamma": 1.0, "lam": 1.0, "c_clip": 1.0, "bootstrap": 0.0},
    "clipped_importance_advantages": {"gamma": 1.0, **PPO},
    "linear_recurrence": {"init": 0.0},
    "masked_var": {"ddof": 1},
    "balance": {"equal_size": False},
    "zigzag_split": {"axis": -1},
    "zigzag_gather": {"axis": -1},
    "grpo_advantages": {"eps": 1e-6},
    "gpg_advantages": {"norm": 1.0},
    "reinforce_pp_advantages": {"gamma": 1.0, "eps": 1e-8},
    "reinforce_pp_baseline_advantages": {"eps": 1e-8},
    "gdpo_advantages": {"eps": 1e-6},
    "passk_advantages": {"scale": True, "eps": 1e-6},
    "group_filter": {"low": -INF, "high": INF},
    "optimal_token_baseline_advantages": {"gamma": 1.0},
    "step_group_advantages": {"gamma": 0.95, "weight": 1.0, "eps": 1e-6},
    "ppo_clip": PPO,
    "clipped_tokens": PPO,
    "decoupled_ppo": PPO,
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gspo": GSPO,
    "gspo_token": GSPO,
    "luspo": {"clip_low": 2e-3, "clip_high": 2.5e-3},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "clip_cov": {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, **PPO},
    "kl_cov": {"fraction": 2e-4, "coef": 1.0},
    "high_entropy_mask": {"quantile": 0.8},
    "value_clip": {"clip": 0.5},
    "value_huber": {"delta": 1.0},
    "gkd": {"beta": 0.5, "temperature": 1.0},
    "top_k_distillation": {"beta": 0.0, "temperature": 1.0},
    "jensen_shannon": {"beta": 0.5},
    "dpo": DPO,
    "dpo_robust": {"beta": 0.1, "label_smoothing": 0.1},
    "dpo_norm": {"beta": 5.0, "label_smoothing": 0.0},
    "f_dpo": {"alpha": 0.5, **DPO},
    "rpo": {"alpha": 1.0, **DPO},
    "aot": DPO,
    "aot_unpaired": DPO,
    "ipo": {"beta": 0.1},
    "hinge": {"beta": 0.1},
    "sppo": {"beta": 1e-3, "chosen_win_rate": 1.0, "rejected_win_rate": 0.0},
    "discopop": {"beta": 0.05, "tau": 0.05},
    "exo": {"beta": 0.1, "label_smoothing": 1e-3},
    "nca": {"beta": 0.01},
    "bco": {"beta": 0.01, "delta": 0.0},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "orpo": {"lam": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "cpo": {"alpha": 1.0, **DPO},
    "tpo": {"beta": 0.01, "alpha": 1.0, "gamma": 0.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "bradley_terry": {"margin": 0.0, "center": 0.0},
    "preference_metrics": {"beta": 0.1},
    "row_state": {"start": 0, "temperature": 1.0},
    "logits_logprobs": {"temperature": 1.0},
    "linear_logprobs": {"temperature": 1.0, "chunk": 4096},
    "sample": {"temperature": 1.0},
    "quantize_int8": {"axis": -1, "half_range": 127.5},
    "quantize_fp8": {"block": 128},
    "smooth_scales": {"alpha": 0.5},
    "tchebycheff": {"rho": 0.01},
    "lagrangian": {"penalty": 0.0, "start": 0.0, "high": INF},
    "exponential_kl": {"coef": 0.2, "up": 1.03, "down": 0.99, "low": 1e-6, "high": INF},
    "linear_kl": {"coef": 0.2, "horizon": 10_000, "samples": 1, "clip": 0.2, "low": 0.0, "high": INF},
    "pid_kl": {"coef": 0.2, "kp": 0.1, "ki": 0.01, "kd": 0.0, "low": 0.0, "high": 10.0},
    "adaptive_entropy": {"coef": 0.0, "step": 0.005, "low": 0.0, "high": INF},
    "scheduled_kl": {"warmup": 0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_these(name):
    parameters = inspect.signature(inspect.unwrap(getattr(rl_fn, name))).parameters
    numbers = {k: p.default for k, p in parameters.items() if isinstance(p.default, bool | int | float)}
    assert numbers == DEFAULTS[name]
