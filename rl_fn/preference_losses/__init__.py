"""Losses of DPO and its family, and of reward models."""

from rl_fn.preference_losses.dpo import dpo, dpo_norm, dpo_robust, f_dpo, rpo
from rl_fn.preference_losses.margin import discopop, hinge, ipo, sppo
from rl_fn.preference_losses.pairwise import apo_down, apo_zero, bco, exo, nca
from rl_fn.preference_losses.reference_free import cpo, orpo, simpo, tpo
from rl_fn.preference_losses.reward_model import PreferenceMetrics, bradley_terry, plackett_luce, preference_metrics
from rl_fn.preference_losses.transport import aot, aot_unpaired
from rl_fn.preference_losses.unpaired import kto, kto_kl, wpo_weights

__all__ = [
    "PreferenceMetrics",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco",
    "bradley_terry",
    "cpo",
    "discopop",
    "dpo",
    "dpo_norm",
    "dpo_robust",
    "exo",
    "f_dpo",
    "hinge",
    "ipo",
    "kto",
    "kto_kl",
    "nca",
    "orpo",
    "plackett_luce",
    "preference_metrics",
    "rpo",
    "simpo",
    "sppo",
    "tpo",
    "wpo_weights",
]
