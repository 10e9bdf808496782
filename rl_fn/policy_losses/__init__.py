"""Policy losses per token, to be minimised."""

from rl_fn.policy_losses.covariance import clip_cov, high_entropy_mask, kl_cov
from rl_fn.policy_losses.ppo import clipped_tokens, entropy_bonus, ppo_clip, reinforce
from rl_fn.policy_losses.regularised import dro, kimi, topr
from rl_fn.policy_losses.sequence_level import gmpo, gspo, gspo_token, luspo, vespo
from rl_fn.policy_losses.token_level import cispo, decoupled_ppo, dppo, gpg_loss, sapo

__all__ = [
    "cispo",
    "clip_cov",
    "clipped_tokens",
    "decoupled_ppo",
    "dppo",
    "dro",
    "entropy_bonus",
    "gmpo",
    "gpg_loss",
    "gspo",
    "gspo_token",
    "high_entropy_mask",
    "kimi",
    "kl_cov",
    "luspo",
    "ppo_clip",
    "reinforce",
    "sapo",
    "topr",
    "vespo",
]
