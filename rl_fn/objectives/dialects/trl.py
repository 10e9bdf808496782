"""TRL 1.16: GRPOTrainer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rl_fn._numerics import Array, as_mask, require
from rl_fn.importance import rejection as corrections
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import Aggregation, EntropyBonus, GRPOAdvantage, PerToken
from rl_fn.objectives.dialects.dialect_losses import Gated, ImportanceBand, RatioClip, TokenLoss, capped_reinforce
from rl_fn.objectives.dialects.dialect_terms import AllRows, BoundedKL
from rl_fn.objectives.dialects.options import one_of, read
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses import sequence_level as sequence_losses
from rl_fn.policy_losses import token_level as token_losses

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "max_completion_length": 512,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclasses.dataclass(frozen=True)
class OffPolicyGate(PerToken):
    """Shut where A < 0 and the sequence's mean log μ/π exceeds the threshold; μ is π_old unless vLLM sampled."""

    threshold: float
    use_vllm: bool = False
    over_batch = False
    gradient_without_advantage = False

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """rollout_logprobs, if vLLM sampled."""
        return ("rollout_logprobs",) if self.use_vllm else ()

    def __call__(self, batch: Batch) -> jax.Array:
        """Return whether the token stays."""
        sampler = batch.rollout_logprobs if self.use_vllm else batch.old_logprobs
        if sampler is None:
            raise ValueError("off_policy_mask_threshold with use_vllm needs batch.rollout_logprobs; it is None")
        return corrections.off_policy_sequence_mask(
            batch.advantages, batch.logprobs, sampler, batch.mask, threshold=self.threshold
        )


@dataclasses.dataclass(frozen=True)
class EntropyGate(PerToken):
    """Open for the tokens of the batch whose entropy is in the highest `fraction`."""

    fraction: float
    accepts_packed = True
    gradient_without_advantage = False
    required_fields = ("entropies",)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return whether the token stays."""
        return entropy_gate(batch, self.fraction)


@dataclasses.dataclass(frozen=True)
class OverHighEntropy(Aggregation):
    """Token mean over the gated tokens alone; needs no entropies of its own, the term is the entropy."""

    mode: str = "token-mean"
    fraction: float = 1.0

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> Any:
        """Return the undivided aggregate."""
        return super().__call__(x, highest(x, mask, self.fraction), segment_ids)


def highest(entropies: Array, mask: Array, fraction: float) -> jax.Array:
    """Return the counted tokens at or above the (1 − fraction) quantile of the counted tokens' entropies."""
    counted = as_mask(mask)
    x = jax.lax.stop_gradient(jnp.asarray(entropies))
    cut = jnp.nanquantile(jnp.where(counted, x, jnp.nan), 1.0 - fraction)
    return counted & (x >= cut)


def entropy_gate(batch: Batch, fraction: float) -> jax.Array:
    """Return the tokens of high entropy; ValueError without entropies."""
    if batch.entropies is None:
        raise ValueError("top_entropy_quantile needs batch.entropies; it is None")
    return highest(batch.entropies, batch.mask, fraction)


@dataclasses.dataclass(frozen=True)
class Vespo(PerToken):
    """VESPO whose sequence weight holds the rollout's correction as well, if there is one."""

    constants: tuple[tuple[str, float], ...]
    correction: ImportanceBand | None = None
    over_batch = False
    gradient_without_advantage = False

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """rollout_logprobs, if there is a correction."""
        return () if self.correction is None else ("rollout_logprobs",)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        old = jnp.asarray(batch.old_logprobs)
        if self.correction is not None:
            if batch.rollout_logprobs is None:
                raise ValueError("vespo with use_vllm needs batch.rollout_logprobs; it is None")
            old = old - jnp.log(jnp.maximum(self.correction(batch), 1e-8))
        constants: dict[str, Any] = dict(self.constants)
        return sequence_losses.vespo(batch.logprobs, old, batch.advantages, batch.mask, **constants)

    def explain(self) -> str:
        """Return the constants."""
        return f"vespo({', '.join(f'{k}={v:g}' for k, v in self.constants)})"


def _correction(o: dict[str, Any]) -> ImportanceBand | None:
    if not (o["use_vllm"] and o["vllm_importance_sampling_correction"]):
        return None
    level, verb = one_of("trl", "vllm_importance_sampling_mode", o["vllm_importance_sampling_mode"], MODES).split("_")
    low, high = o["vllm_importance_sampling_clip_min"], o["vllm_importance_sampling_clip_max"]
    return ImportanceBand(
        low=0.0 if low is None else float(low),
        high=math.inf if high is None else float(high),
        mode="clip" if verb == "truncate" else "mask",
        level="token" if level == "token" else "sequence_sum",
    )


def _loss(o: dict[str, Any], level: str, correction: ImportanceBand | None) -> Callable[[Batch], jax.Array]:
    low = float(o["epsilon"])
    high = low if o["epsilon_high"] is None else float(o["epsilon_high"])
    kind = o["loss_type"]
    if kind == "cispo":
        loss: Callable[[Batch], jax.Array] = TokenLoss(capped_reinforce, (("cap", high), ("level", level)))
    elif kind == "sapo":
        taus = (("tau_pos", o["sapo_temperature_pos"]), ("tau_neg", o["sapo_temperature_neg"]))
        loss = SequenceSapo(taus, level)
    elif kind == "vespo":
        require(level == "token", "trl: vespo needs importance_sampling_level='token'")
        whole_sequence = correction is not None and correction.level != "token"
        require(not whole_sequence, "trl: vespo needs vllm_importance_sampling_mode token_truncate or token_mask")
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        loss = Vespo(tuple((name, float(o[f"vespo_{name}"])) for name in names), correction)
    else:
        delta = o["delta"]
        fits = delta is None or delta >= 1 + high
        require(fits, f"trl: a delta below 1 + epsilon_high is not covered, got {delta} and {high}")
        loss = RatioClip(low, high, None if delta is None else float(delta), level=level)
    gates: list[Callable[[Batch], jax.Array]] = []
    if o["off_policy_mask_threshold"] is not None:
        gates.append(OffPolicyGate(float(o["off_policy_mask_threshold"]), bool(o["use_vllm"])))
    if o["top_entropy_quantile"] < 1.0:
        gates.append(EntropyGate(float(o["top_entropy_quantile"])))
    return Gated(loss, tuple(gates)) if gates else loss


@dataclasses.dataclass(frozen=True)
class SequenceSapo(PerToken):
    """SAPO on the ratio of the token or of its sequence."""

    constants: tuple[tuple[str, float], ...]
    level: str
    accepts_packed = True
    over_batch = False
    gradient_without_advantage = False

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = RatioClip(level=self.level).referred(batch)
        return token_losses.sapo(b.logprobs, b.old_logprobs, b.advantages, b.mask, **dict(self.constants))

    def explain(self) -> str:
        """Return the constants."""
        return f"sapo({', '.join(f'{k}={v:g}' for k, v in self.constants)}), ρ per {self.level}"


def _aggregation(o: dict[str, Any]) -> Aggregation:
    kind = o["loss_type"]
    if kind in ("grpo", "sapo"):
        return AllRows("seq-mean-token-mean")
    if kind == "luspo":
        return AllRows("seq-mean-token-sum")
    if kind == "dr_grpo":
        return AllRows("seq-mean-token-sum-norm", float(o["max_completion_length"]))
    return Aggregation("token-mean")


def trl(config: Mapping[str, Any]) -> Objective:
    """Return what TRL's GRPOTrainer computes for options of its GRPOConfig.

    Fully masked rows count in the mean of grpo, sapo, luspo and dr_grpo; epsilon_high is CISPO's cap itself; eps of the
    advantage is 1e-4. dapo, cispo and vespo divide by the tokens of the generation batch: pass that as `denominator`.

    Args:
        config: options under TRL's names, flat or nested.

    Returns:
        Objective; its advantages take one reward per completion, already weighted and summed over reward functions.

    Raises:
        ValueError: for an unknown option or value, or a combination that is not covered.

    Reference:
        TRL 1.16, trl/trainer/grpo_trainer.py; the values are compared with it (docs/dialects.md).

    >>> from rl_fn import dialects
    >>> print(dialects.trl({"loss_type": "cispo", "epsilon_high": 5.0}).explain())
    trl cispo: minimise token-mean of ℓ
      ℓ = capped_reinforce(cap=5.0, level=token)
      A = (r − mean)/(std of the group + 0.0001)
      ρ = exp(logprobs − old_logprobs)

    """
    o = read("trl", config, DEFAULTS)
    kind = one_of("trl", "loss_type", o["loss_type"], LOSSES)
    level = one_of("trl", "importance_sampling_level", o["importance_sampling_level"], ("token", "sequence"))
    scale = {True: "group", False: "none"}.get(o["scale_rewards"], o["scale_rewards"])
    scale = one_of("trl", "scale_rewards", scale, ("group", "batch", "none"))
    beta, entropy, fraction = (float(o[name]) for name in ("beta", "entropy_coef", "top_entropy_quantile"))
    correction = _correction(o)
    return Objective(
        name=f"trl {kind}",
        advantage=GRPOAdvantage(scale, 1e-4),
        loss=_loss(o, level, correction),
        aggregation=_aggregation(o),
        kl=BoundedKL("k3", beta, weight=level if o["use_bias_correction_kl"] else None) if beta else None,
        correction=None if kind == "vespo" else correction,
        entropy=EntropyBonus(entropy) if entropy else None,
        entropy_aggregation=OverHighEntropy(fraction=fraction) if entropy else None,
        strict=False,
    )
