"""Recipes: an Objective is a frozen composition of small pieces, each a function of a Batch, each replaceable."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_mask, exp
from rl_fn.advantages import Advantages
from rl_fn.aggregation import Ratio, aggregate_parts
from rl_fn.batch import Batch, sanitised
from rl_fn.divergences import kl_k3
from rl_fn.pieces import GAE, KL, Aggregation, Entropy, describe


@dataclasses.dataclass(frozen=True)
class Objective:
    """Advantage estimator, policy loss, aggregation, KL penalty, off-policy correction and entropy bonus.

    loss = aggregate(w · ℓ + β · kl − c · H)

    A piece is a function: `advantage(rewards)` returns one number per answer; `loss(batch)`, `correction(batch)` (the
    weights) and `kl.estimate(batch)` one per token. The library's pieces are frozen dataclasses, so that an objective
    is hashable, compares by value and can be a static argument of jit. Any hashable function of a Batch can stand in
    for `loss` or `correction`, any of rewards `*batch G` for `advantage`.

    >>> import jax.numpy as jnp
    >>> import rl_fn
    >>> objective = rl_fn.dapo()._replace(aggregation=Aggregation("seq-mean-token-mean"))
    >>> mask = jnp.ones((2, 3), bool)
    >>> a = objective.advantages(jnp.array([1.0, 0.0]), mask)
    >>> loss, metrics = objective(Batch(jnp.zeros((2, 3)), jnp.zeros((2, 3)), a, mask))
    >>> float(loss), float(metrics["clip_fraction"])
    (0.0, 0.0)
    """

    name: str
    advantage: Callable[..., Any]
    loss: Callable[[Batch], Array]
    aggregation: Aggregation
    kl: KL | None = None
    correction: Callable[[Batch], Array] | None = None
    entropy: Entropy | None = None

    def _replace(self, **pieces: Any) -> "Objective":
        """Return this objective with other pieces, as a NamedTuple does."""
        return dataclasses.replace(self, **pieces)

    def advantages(
        self, rewards: Float[Array, "*batch G"], mask: Bool[Array, "*batch G T"]
    ) -> Float[Array, "*batch G T"]:
        """Per-token advantages from one reward per answer, once for the whole rollout batch; zero where masked."""
        if isinstance(self.advantage, GAE):
            raise ValueError(f"{self.name} needs a critic: call token_advantages(token_rewards, values, mask)")
        per_answer = self.advantage(rewards)
        counted = as_mask(mask)
        return jnp.where(counted, jnp.broadcast_to(per_answer[..., None], counted.shape), 0.0)

    def token_advantages(
        self, token_rewards: Tokens, values: Tokens, mask: Mask, *, segment_ids: Segments | None = None
    ) -> Advantages:
        """Per-token advantages and returns from token rewards and a critic's values, for an objective with a critic."""
        if not isinstance(self.advantage, GAE):
            raise ValueError(f"{self.name} has no critic: call advantages(rewards, mask)")
        return self.advantage(token_rewards, values, mask, segment_ids)

    def denominator(self, mask: Mask, segment_ids: Segments | None = None) -> Float[Array, ""]:
        """Count what the aggregation divides by; computed over the whole batch, passed to each of its micro-batches."""
        counted = as_mask(mask)
        return self.aggregation(jnp.zeros(counted.shape, jnp.float32), counted, segment_ids).denominator

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch lacks what a piece reads."""
        needs = {
            "ref_logprobs": ("kl", self.kl),
            "entropies": ("entropy", self.entropy),
            "rollout_logprobs": ("correction", self.correction),
        }
        for field, (piece, value) in needs.items():
            if value is not None and getattr(batch, field) is None:
                raise ValueError(f"{self.name} has {piece}={value}, which needs batch.{field}; it is None")

    def parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics: the parts of micro-batches, packs and ranks add up to the whole batch's."""
        self.check(batch)
        b = sanitised(batch)
        policy = jnp.asarray(self.loss(b))
        metrics: dict[str, Array] = {}
        if self.correction is not None:
            weights = jnp.asarray(self.correction(b))
            policy = weights * policy
            metrics["correction_weight"] = weights
        total = policy
        if b.ref_logprobs is not None:
            kl = (self.kl or KL(coef=0.0)).estimate(b)
            metrics["kl"] = kl
            total = total if self.kl is None else total + self.kl.coef * kl
        if b.entropies is not None:
            metrics["entropy"] = jnp.asarray(b.entropies)
            total = total if self.entropy is None else total - self.entropy.coef * jnp.asarray(b.entropies)
        metrics["ratio_mean"] = exp(jnp.asarray(b.logprobs) - jnp.asarray(b.old_logprobs))
        metrics["approx_kl"] = kl_k3(b.old_logprobs, b.logprobs)
        clipped = getattr(self.loss, "clipped", None)
        if clipped is not None:
            metrics["clip_fraction"] = clipped(b).astype(policy.dtype)
        if b.rollout_logprobs is not None:
            metrics["mismatch_k3"] = kl_k3(b.rollout_logprobs, b.old_logprobs)
        mean = {name: aggregate_parts(jax.lax.stop_gradient(x), b.mask, "token-mean") for name, x in metrics.items()}
        mean["policy_loss"] = self.aggregation(jax.lax.stop_gradient(policy), b.mask, b.segment_ids)
        return self.aggregation(total, b.mask, b.segment_ids), mean

    def __call__(
        self, batch: Batch, *, denominator: Number | Float[Array, ""] | None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Loss and metrics of a batch; with `denominator`, a micro-batch's share of the whole batch's loss.

        Metrics are means over the tokens given here; for those of a whole batch add up `parts`.
        """
        loss, metrics = self.parts(batch)
        if denominator is not None:
            loss = Ratio(loss.total, jnp.asarray(denominator).astype(loss.total.dtype))
        return loss.value(), {name: ratio.value() for name, ratio in metrics.items()}

    def explain(self) -> str:
        """Return the equation with its constants, one line a piece."""
        terms = ["w·ℓ" if self.correction is not None else "ℓ"]
        terms += [] if self.kl is None else [f"{self.kl.coef:g}·kl"]
        sign = [] if self.entropy is None else [f" − {self.entropy.coef:g}·H"]
        lines = [f"{self.name}: minimise {describe(self.aggregation)} of {' + '.join(terms)}{''.join(sign)}"]
        rows = {"ℓ": self.loss, "A": self.advantage, "w": self.correction, "kl": self.kl}
        lines += [f"  {symbol} = {describe(piece)}" for symbol, piece in rows.items() if piece is not None]
        return "\n".join([*lines, "  ρ = exp(logprobs − old_logprobs)"])
