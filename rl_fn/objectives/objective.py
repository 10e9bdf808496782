"""Recipes: an Objective is a frozen composition of small pieces, each a function of a Batch, each replaceable."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_float, as_mask, exp
from rl_fn.advantages.returns import Advantages
from rl_fn.aggregation import Ratio, aggregate_parts
from rl_fn.divergences.estimators import kl_k3
from rl_fn.objectives.batch import Batch, Rollouts, detached, sanitised
from rl_fn.objectives.compatibility import refuse_impossible
from rl_fn.objectives.components import (
    GAE,
    KL,
    Aggregation,
    Entropy,
    RolloutEstimator,
    ValueLoss,
    WhitenedReturns,
    describe,
    on_last_token,
    read_by,
)


@dataclasses.dataclass(frozen=True)
class Objective:
    """Advantage estimator, policy loss, aggregation, KL penalty, off-policy correction, entropy bonus, critic's loss.

    loss = aggregate(w · ℓ + β · kl − c · H)

    reward_kl puts the penalty into the rewards instead: r − β · kl(π_old, π_ref). value is the critic's loss, for
    value_parts. Pieces that do not go together are refused when the objective is made.

    A piece is a function: `advantage(rewards)` returns one number per answer (a RolloutEstimator reads more, GAE a
    critic); `loss(batch)`, `correction(batch)` (the
    weights) and `kl.estimate(batch)` one per token. The library's pieces are frozen dataclasses, so that an objective
    is hashable, compares by value and can be a static argument of jit. Any hashable function of a Batch can stand in
    for `loss` or `correction`, any of rewards `*batch G` for `advantage`.

    >>> import jax.numpy as jnp
    >>> import rl_fn
    >>> objective = rl_fn.recipes.dapo()._replace(aggregation=Aggregation("seq-mean-token-mean"))
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
    reward_kl: KL | None = None
    value: ValueLoss | None = None

    def __post_init__(self) -> None:
        # A subclass (a dialect) reproduces what some library computes, whether or not it makes sense.
        if type(self) is Objective:
            refuse_impossible(**{field.name: getattr(self, field.name) for field in _PIECES})

    def _replace(self, **pieces: Any) -> "Objective":
        """Return this objective with other pieces, as a NamedTuple does."""
        return dataclasses.replace(self, **pieces)

    def needs(self) -> tuple[str, ...]:
        """Fields of a Batch that the loss reads beyond logprobs, old_logprobs, advantages and mask."""
        fields = [*read_by(self.loss)]
        fields += [] if self.correction is None else read_by(self.correction, ("rollout_logprobs",))
        fields += [] if self.kl is None else ["ref_logprobs"]
        fields += [] if self.entropy is None else ["entropies"]
        return tuple(dict.fromkeys(fields))

    def inputs(self) -> tuple[str, ...]:
        """Fields of Rollouts that the advantages read beyond the mask; for a critic, arguments of token_advantages."""
        if isinstance(self.advantage, GAE):
            return ("token_rewards", "values")
        fields = self.advantage.reads if isinstance(self.advantage, RolloutEstimator) else ("rewards",)
        return tuple(dict.fromkeys([*fields, *([] if self.reward_kl is None else ["old_logprobs", "ref_logprobs"])]))

    def advantages(
        self,
        rewards: Float[Array, "..."],
        mask: Bool[Array, "..."],
        *,
        old_logprobs: Float[Array, "..."] | None = None,
        ref_logprobs: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Per-token advantages from one reward per answer, once for the whole rollout batch; zero where masked.

        rewards `*batch G`, mask `*batch G T`; the two log-probabilities only with a KL in the reward. What needs more
        takes advantages_of.
        """
        return self.advantages_of(Rollouts(rewards, mask, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs))

    def advantages_of(self, rollouts: Rollouts) -> Float[Array, "..."]:
        """Per-token advantages of scored rollouts, once for the whole rollout batch; zero where masked."""
        if isinstance(self.advantage, GAE):
            raise ValueError(
                f"{self.name} needs a critic: call token_advantages(token_rewards, values, mask), with token_rewards "
                "from token_rewards(rewards, mask)"
            )
        for field in self.inputs():
            if getattr(rollouts, field) is None:
                raise ValueError(
                    f"{self.name} has advantage={self.advantage}, which needs Rollouts.{field}; it is None"
                )
        r = rollouts
        if self.reward_kl is not None and r.rewards is not None:
            penalty = self.penalty(r.mask, r.old_logprobs, r.ref_logprobs)
            if isinstance(self.advantage, WhitenedReturns):
                r = r._replace(token_rewards=on_last_token(r.rewards, r.mask) - penalty)
            else:
                r = r._replace(rewards=as_float(r.rewards)[0] - jnp.sum(penalty, axis=-1))
        if isinstance(self.advantage, RolloutEstimator):
            return self.advantage(r)
        per_answer = self.advantage(r.rewards)
        counted = as_mask(r.mask)
        return jnp.where(counted, jnp.broadcast_to(per_answer[..., None], counted.shape), 0.0)

    def penalty(
        self,
        mask: Bool[Array, "..."],
        old_logprobs: Float[Array, "..."] | None,
        ref_logprobs: Float[Array, "..."] | None,
    ) -> Float[Array, "..."]:
        """Return β · kl per token, what reward_kl takes off the rewards; zero without it."""
        counted = as_mask(mask)
        zeros = jnp.zeros(counted.shape, jnp.float32)
        if self.reward_kl is None:
            return zeros
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError(f"{self.name} has {self.reward_kl} in the reward: give old_logprobs and ref_logprobs")
        read = sanitised(Batch(old_logprobs, zeros, zeros, counted, ref_logprobs=ref_logprobs))
        return jnp.where(counted, self.reward_kl.coef * self.reward_kl.estimate(read), 0.0)

    def token_rewards(
        self,
        rewards: Float[Array, "*batch G"],
        mask: Bool[Array, "*batch G T"],
        *,
        old_logprobs: Float[Array, "*batch G T"] | None = None,
        ref_logprobs: Float[Array, "*batch G T"] | None = None,
    ) -> Float[Array, "*batch G T"]:
        """Return the reward on each answer's last counted token, less reward_kl on every one: a critic's input."""
        return on_last_token(rewards, mask) - self.penalty(mask, old_logprobs, ref_logprobs)

    def token_advantages(
        self, token_rewards: Tokens, values: Tokens, mask: Mask, *, segment_ids: Segments | None = None
    ) -> Advantages:
        """Per-token advantages and returns from token rewards and a critic's values, for an objective with a critic."""
        if not isinstance(self.advantage, GAE):
            raise ValueError(f"{self.name} has no critic: call advantages(rewards, mask)")
        return self.advantage(token_rewards, values, mask, segment_ids)

    def value_parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics of the critic, from batch.values and batch.returns."""
        if self.value is None:
            raise ValueError(
                f"{self.name} has no critic's loss: give value=ValueLoss() with an advantage from a critic"
            )
        self._require(batch, "value", self.value, self.value.reads)
        b = detached(sanitised(batch), except_for=("values",))
        loss = self.value(b)
        fixed = {"values": b.values, "returns": b.returns, "value_loss": loss}
        metrics = {
            name: aggregate_parts(jax.lax.stop_gradient(jnp.asarray(x)), b.mask, "token-mean")
            for name, x in fixed.items()
        }
        return self.aggregation(loss, b.mask, b.segment_ids), metrics

    def denominator(self, mask: Mask, segment_ids: Segments | None = None) -> Float[Array, ""]:
        """Count what the aggregation divides by; computed over the whole batch, passed to each of its micro-batches."""
        counted = as_mask(mask)
        return self.aggregation(jnp.zeros(counted.shape, jnp.float32), counted, segment_ids).denominator

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch lacks what a piece reads."""
        self._require(batch, "loss", self.loss, read_by(self.loss))
        self._require(batch, "kl", self.kl, ("ref_logprobs",))
        self._require(batch, "correction", self.correction, read_by(self.correction, ("rollout_logprobs",)))
        self._require(batch, "entropy", self.entropy, ("entropies",))

    def _require(self, batch: Batch, piece: str, value: Any, fields: tuple[str, ...]) -> None:
        for field in fields:
            if value is not None and getattr(batch, field) is None:
                raise ValueError(f"{self.name} has {piece}={value}, which needs batch.{field}; it is None")

    def parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics: the parts of micro-batches, packs and ranks add up to the whole batch's."""
        self.check(batch)
        b = detached(sanitised(batch), except_for=("logprobs", "entropies"))
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
        rows = {"ℓ": self.loss, "A": self.advantage, "w": self.correction, "kl": self.kl, "critic": self.value}
        lines += [f"  {symbol} = {describe(piece)}" for symbol, piece in rows.items() if piece is not None]
        if self.reward_kl is not None:
            lines.append(f"  r less {self.reward_kl.coef:g}·({describe(self.reward_kl)}, of old_logprobs)")
        return "\n".join([*lines, "  ρ = exp(logprobs − old_logprobs)"])


_PIECES = tuple(field for field in dataclasses.fields(Objective) if field.name != "entropy")
