"""An Objective is a frozen composition of components, each replaceable."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, Mask, Number, Segments, as_mask, exp, require
from rl_fn.advantages.returns import Advantages
from rl_fn.aggregation import Ratio, aggregate_parts
from rl_fn.divergences.estimators import kl_k3
from rl_fn.objectives.batch import Batch, Rollouts, counted, detached, sanitised, token_rewards_of, without_weight
from rl_fn.objectives.components import (
    KL,
    Advantage,
    Aggregation,
    CustomAdvantage,
    DynamicSampling,
    EntropyBonus,
    ValueLoss,
)
from rl_fn.objectives.components.component import check_function, got, per_token, shown


class Selection(NamedTuple):
    """What of a rollout batch an update needs: `rows` to compute, `mask` for the denominator to count."""

    rows: Bool[Array, "*batch G"]
    mask: Bool[Array, "*batch G T"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Advantage estimator, policy loss, aggregation, KL penalty, off-policy correction, entropy bonus, critic's loss.

    loss = aggregate(w · ℓ + β · kl − c · H)

    reward_kl puts the penalty into the rewards instead: r − β · kl(π_old, π_ref). value is the critic's loss, for
    value_parts. dynamic_sampling leaves groups without a signal out of the update and of its denominator.
    kl_aggregation and entropy_aggregation average a term apart from the policy loss: micro-batches then do not add up
    to the batch. Components that do not go together are refused when the objective is made, unless strict is False:
    a dialect reproduces what another library computes, whether or not it makes sense.

    Components are frozen dataclasses, so that an objective is hashable, compares by value and can be a static argument
    of jit. Any hashable function of a Batch can be `loss` or `correction`; components.Custom says more of it than the
    safe defaults. Any function of rewards `*batch G` can be `advantage`.

    >>> import jax.numpy as jnp
    >>> import rl_fn
    >>> objective = rl_fn.recipes.dapo().replace(aggregation=Aggregation("seq-mean-token-mean"))
    >>> mask = jnp.ones((2, 3), bool)
    >>> a = objective.advantages(Rollouts(jnp.array([1.0, 0.0]), mask)).advantages
    >>> loss, metrics = objective(Batch(jnp.zeros((2, 3)), jnp.zeros((2, 3)), a, mask))
    >>> float(loss), float(metrics["clip_fraction"])
    (0.0, 0.0)
    """

    name: str
    advantage: Any
    loss: Any
    aggregation: Aggregation
    kl: KL | None = None
    correction: Any = None
    entropy: EntropyBonus | None = None
    reward_kl: KL | None = None
    value: ValueLoss | None = None
    dynamic_sampling: DynamicSampling | None = None
    kl_aggregation: Aggregation | None = None
    entropy_aggregation: Aggregation | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        advantage = self.advantage if isinstance(self.advantage, Advantage) else CustomAdvantage(self.advantage)
        object.__setattr__(self, "advantage", advantage)
        object.__setattr__(self, "loss", per_token(self.loss, ("loss",)))
        if self.correction is not None:
            correction = per_token(self.correction, ("correction",), ("rollout_logprobs",))
            object.__setattr__(self, "correction", correction)
        if self.strict:
            check_compatible(self)

    def replace(self, **components: Any) -> "Objective":
        """Return this objective with other components, checked as a new one is."""
        return dataclasses.replace(self, **components)

    @property
    def required_batch_fields(self) -> tuple[str, ...]:
        """Fields of a Batch that the loss reads beyond logprobs, old_logprobs, advantages and mask."""
        parts = [part for part in (self.loss, self.correction, self.kl, self.entropy) if part is not None]
        return tuple(dict.fromkeys(name for part in parts for name in part.required_fields))

    @property
    def required_rollout_fields(self) -> tuple[str, ...]:
        """Fields of Rollouts that the advantages read beyond the mask; token_rewards may stand in for rewards."""
        in_reward = () if self.reward_kl is None else ("old_logprobs", *self.reward_kl.required_fields)
        return tuple(dict.fromkeys([*self.advantage.required_fields, *in_reward]))

    @property
    def over_batch(self) -> bool:
        """Whether micro-batches do not add up to the batch: the whole batch must be passed at once."""
        apart = self.kl_aggregation is not None or self.entropy_aggregation is not None
        return apart or self.loss.over_batch or (self.correction is not None and self.correction.over_batch)

    @property
    def gradient_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 may have a gradient."""
        return self.kl is not None or self.entropy is not None or self.loss.gradient_without_advantage

    @property
    def accepts_packed(self) -> bool:
        """Whether rows of a Batch may hold several sequences."""
        means = (self.aggregation, self.kl_aggregation, self.entropy_aggregation)
        parts = [part for part in (self.loss, self.correction, *means) if part is not None]
        return all(part.accepts_packed for part in parts)

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Advantages and returns per token, once for the whole rollout batch; zero where masked or not valid.

        A group that dynamic sampling drops is not valid: statistics of the batch are those without it.
        Returns are None without a critic. With reward_kl the penalty is taken off the rewards here.
        """
        for field in self.required_rollout_fields:
            stands_in = field == "rewards" and self.advantage.token_rewards and rollouts.token_rewards is not None
            missing = getattr(rollouts, field) is None and not stands_in
            require(
                not missing, f"{self.name} has advantage={self.advantage}, which needs Rollouts.{field}; it is None"
            )
        for field in ("valid", "group_ids"):
            taken = getattr(rollouts, field) is None or getattr(self.advantage, f"takes_{field}")
            require(taken, f"{self.name}: {self.advantage} does not take Rollouts.{field}")
        packed = rollouts.segment_ids is not None and not self.advantage.accepts_packed
        require(
            not packed,
            f"{self.advantage} does not take packed rows: compute advantages before packing, one sequence a row",
        )
        return self.advantage(self._penalised(self._without_dropped(rollouts)))

    def _without_dropped(self, rollouts: Rollouts) -> Rollouts:
        if self.dynamic_sampling is None or rollouts.rewards is None or not self.advantage.takes_valid:
            return rollouts
        kept = self.dynamic_sampling.kept(rollouts)
        return rollouts._replace(valid=kept if rollouts.valid is None else kept & as_mask(rollouts.valid))

    def token_rewards(self, rollouts: Rollouts) -> Float[Array, "..."]:
        """Return the reward on each completion's last counted token, or token_rewards, less reward_kl on every one."""
        return token_rewards_of(self._penalised(rollouts))

    def _penalised(self, rollouts: Rollouts) -> Rollouts:
        if self.reward_kl is None:
            return rollouts
        require(rollouts.penalties is None, f"{self.name} has {self.reward_kl} in the reward: give no penalties")
        old, ref = rollouts.old_logprobs, rollouts.ref_logprobs
        if old is None or ref is None:
            raise ValueError(f"{self.name} has {self.reward_kl} in the reward: give old_logprobs and ref_logprobs")
        mask = counted(rollouts)
        zeros = jnp.zeros(mask.shape, jnp.float32)
        read = sanitised(Batch(old, zeros, zeros, mask, ref_logprobs=ref))
        return rollouts._replace(penalties=jnp.where(mask, self.reward_kl.coef * self.reward_kl.estimate(read), 0.0))

    def selection(self, rollouts: Rollouts, advantages: Float[Array, "..."]) -> Selection:
        """Which completions an update must compute, and which tokens its denominator counts.

        rows are those whose loss or gradient is not zero for sure: without dynamic sampling the others are still in
        mask, so that leaving their computation out changes neither loss nor gradient. Of the metrics it changes none
        whose share of these rows is 0, divided by what mask counts: policy_loss and clip_fraction. The others are then
        means over the computed rows, for what they measure of the others is not known.
        """
        mask = counted(rollouts)
        if self.dynamic_sampling is not None:
            mask = mask & self.dynamic_sampling.kept(rollouts)[..., None]
        rows = jnp.any(mask, axis=-1)
        if not (self.gradient_without_advantage or self.over_batch):
            rows = rows & jnp.any(mask & (jnp.asarray(advantages) != 0), axis=-1)
        return Selection(rows, mask)

    def value_parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics of the critic, from batch.values and batch.returns."""
        if self.value is None:
            raise ValueError(
                f"{self.name} has no critic's loss: give value=ValueLoss() with an advantage from a critic"
            )
        self._require(batch, "value", self.value)
        b = detached(sanitised(batch), except_for=("values",))
        loss = self.value(b)
        metrics = {"values": b.values, "returns": b.returns, "value_loss": loss}
        mean = {name: self._token_mean(jnp.asarray(x), b) for name, x in metrics.items()}
        return self.aggregation(loss, b.mask, b.segment_ids), mean

    def denominator(self, mask: Mask, segment_ids: Segments | None = None) -> Float[Array, ""]:
        """Count what the aggregation divides by; computed over the whole batch, passed to each of its micro-batches."""
        where = as_mask(mask)
        return self.aggregation(jnp.zeros(where.shape, jnp.float32), where, segment_ids).denominator

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch lacks what a component reads."""
        for slot in ("loss", "kl", "correction", "entropy"):
            self._require(batch, slot, getattr(self, slot))
        packed = batch.segment_ids is not None and not self.accepts_packed
        require(
            not packed, f"{self.name}: a component does not take packed rows: unpack segment_ids first, or declare it"
        )

    def _require(self, batch: Batch, slot: str, component: Any) -> None:
        for field in () if component is None else component.required_fields:
            missing = getattr(batch, field) is None
            require(not missing, f"{self.name} has {slot}={component}, which needs batch.{field}; it is None")

    @staticmethod
    def _token_mean(x: jax.Array, b: Batch) -> Ratio:
        return aggregate_parts(jax.lax.stop_gradient(x), b.mask, "token-mean")

    def _policy(self, b: Batch, metrics: dict[str, Array]) -> jax.Array:
        """Return w · ℓ per token; what has weight 0 is not in it, whatever ℓ is."""
        if self.correction is None:
            return jnp.asarray(self.loss(b))
        weights = metrics["correction_weight"] = jnp.asarray(self.correction(b))
        loss = jnp.asarray(self.loss(without_weight(b, weights)))
        return jnp.where(weights == 0, 0.0, weights * loss)

    def parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics: the parts of micro-batches, packs and ranks add up to the whole batch's."""
        self.check(batch)
        b = detached(sanitised(batch), except_for=("logprobs", "entropies"))
        metrics: dict[str, Array] = {}
        total = policy = self._policy(b, metrics)
        apart: list[tuple[Any, jax.Array, Aggregation]] = []
        if b.ref_logprobs is not None:
            metrics["kl"] = kl = (self.kl or KL(coef=0.0)).estimate(b)
            if self.kl is not None and self.kl_aggregation is None:
                total = total + self.kl.coef * kl
            elif self.kl is not None and self.kl_aggregation is not None:
                apart.append((self.kl.coef, kl, self.kl_aggregation))
        if b.entropies is not None:
            metrics["entropy"] = entropies = jnp.asarray(b.entropies)
            if self.entropy is not None and self.entropy_aggregation is None:
                total = total - self.entropy.coef * entropies
            elif self.entropy is not None and self.entropy_aggregation is not None:
                apart.append((-self.entropy.coef, entropies, self.entropy_aggregation))
        metrics["ratio_mean"] = exp(jnp.asarray(b.logprobs) - jnp.asarray(b.old_logprobs))
        metrics["approx_kl"] = kl_k3(b.old_logprobs, b.logprobs)
        clipped = self.loss.clipped(b)
        if clipped is not None:
            metrics["clip_fraction"] = clipped.astype(policy.dtype)
        if b.rollout_logprobs is not None:
            metrics["mismatch_k3"] = kl_k3(b.rollout_logprobs, b.old_logprobs)
        mean = {name: self._token_mean(x, b) for name, x in metrics.items()}
        mean["policy_loss"] = self.aggregation(jax.lax.stop_gradient(policy), b.mask, b.segment_ids)
        loss = self.aggregation(total, b.mask, b.segment_ids)
        # A term that is already divided joins as term · denominator; a denominator of 0 divides by nothing.
        scale = jnp.where(loss.denominator == 0, 1.0, loss.denominator)
        for coef, x, aggregation in apart:
            term = coef * aggregation(x, b.mask, b.segment_ids).value()
            loss = Ratio(loss.total + term * scale, loss.denominator)
        return loss, mean

    def share(self, batch: Batch, denominator: Number | Float[Array, ""]) -> tuple[Float[Array, ""], dict[str, Ratio]]:
        """Return a micro-batch's share of the whole batch's loss, and its undivided metrics, which add up.

        denominator is the whole batch's; 0, that of a sum, divides by nothing.
        """
        loss, metrics = self.parts(batch)
        return Ratio(loss.total, jnp.asarray(denominator).astype(loss.total.dtype)).value(), metrics

    def __call__(
        self, batch: Batch, *, denominator: Number | Float[Array, ""] | None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Loss and metrics of a batch; with `denominator`, a micro-batch's share of the whole batch's loss.

        Metrics are means over the tokens given here; for those of a whole batch add up `parts`.
        """
        parts, metrics = self.parts(batch)
        loss = parts if denominator is None else Ratio(parts.total, jnp.asarray(denominator).astype(parts.total.dtype))
        return loss.value(), {name: ratio.value() for name, ratio in metrics.items()}

    def explain(self) -> str:
        """Return the equation with its constants, one line a component."""
        terms = ["w·ℓ" if self.correction is not None else "ℓ"]
        terms += [] if self.kl is None else [f"{shown(self.kl.coef)}·kl"]
        sign = "" if self.entropy is None else f" − {shown(self.entropy.coef)}·H"
        lines = [f"{self.name}: minimise {self.aggregation.explain()} of {' + '.join(terms)}{sign}"]
        rows = {"ℓ": self.loss, "A": self.advantage, "w": self.correction, "kl": self.kl, "critic": self.value}
        lines += [f"  {symbol} = {part.explain()}" for symbol, part in rows.items() if part is not None]
        if self.reward_kl is not None:
            lines.append(f"  r less {shown(self.reward_kl.coef)}·({self.reward_kl.explain()}, of old_logprobs)")
        lines.append("  ρ = exp(logprobs − old_logprobs)")
        named = {
            "trained on": self.dynamic_sampling,
            "kl averaged by": self.kl_aggregation,
            "H averaged by": self.entropy_aggregation,
        }
        return "\n".join([*lines, *(f"  {name} {part.explain()}" for name, part in named.items() if part is not None)])


KINDS = {
    "name": (str, "a text"),
    "aggregation": (Aggregation, "Aggregation(mode)"),
    "kl": (KL, "KL(estimator, coef)"),
    "entropy": (EntropyBonus, "EntropyBonus(coef)"),
    "reward_kl": (KL, "KL(estimator, coef)"),
    "value": (ValueLoss, "ValueLoss(clip)"),
    "dynamic_sampling": (DynamicSampling, "DynamicSampling(low, high)"),
    "kl_aggregation": (Aggregation, "Aggregation(mode)"),
    "entropy_aggregation": (Aggregation, "Aggregation(mode)"),
    "strict": (bool, "True or False"),
}
"""The kind of each field that takes no function, in words too."""


def check_kinds(o: Objective) -> None:
    """Raise TypeError for a field that holds another kind of object, by its name."""
    optional = {field.name for field in dataclasses.fields(o) if field.default is None}
    for name, (kind, expected) in KINDS.items():
        value = getattr(o, name)
        if not isinstance(value, kind) and not (value is None and name in optional):
            raise TypeError(f"{name} is {expected}, {got(value)}")
    check_function("advantage", o.advantage, "an advantage component or a function of rewards", Advantage.slots)


def check_compatible(o: Objective) -> None:
    """Raise ValueError with the reason and the remedy if an objective's components do not go together."""
    name, loss, advantage = o.name, o.loss, o.advantage
    require(
        o.aggregation.mode in loss.modes,
        f"{name}: {loss} is the loss of a whole sequence at each of its tokens, which {o.aggregation.mode!r} would "
        f"weight wrongly: aggregate by one of {', '.join(loss.modes)}, or take a loss per token (GSPOToken for GSPO, "
        "level='token' for DRO and Kimi)",
    )
    # A penalty on each token makes advantages differ inside a completion where it is not summed.
    per_token = advantage.per_token or (o.reward_kl is not None and advantage.token_rewards)
    require(
        not (per_token and loss.sequence_level),
        f"{name}: {advantage} gives each token its own advantage, which the sequence ratio of {loss} spreads over "
        "the whole completion: take GSPOToken, or one advantage a completion (GRPOAdvantage)",
    )
    require(
        o.correction is None or not (o.correction.weighs_rollout and loss.weighs_rollout),
        f"{name}: {loss} already weighs by the ratio to rollout_logprobs, and {o.correction} would count it twice: "
        "drop the correction (correction=None), or take a loss whose ratio is to old_logprobs (PPOClip for "
        "DecoupledPPO, behaviour='old' for VESPO, TOPR and DPPO)",
    )
    require(
        o.kl is None or o.reward_kl is None,
        f"{name}: the KL to the reference is in the reward ({o.reward_kl}) and in the loss ({o.kl}), which penalises "
        "it twice: keep one (kl=None or reward_kl=None)",
    )
    require(
        o.reward_kl is None or advantage.takes_penalty,
        f"{name}: the rewards of {advantage} cannot hold a KL penalty: put it into the loss (kl=..., reward_kl=None)",
    )
    require(
        o.value is None or advantage.critic,
        f"{name}: {o.value} trains a critic, which {advantage} does not use: drop it (value=None), or take the "
        "advantage from the critic (GAE)",
    )
    require(
        o.dynamic_sampling is None or advantage.rewards_shape == "*batch G",
        f"{name}: dynamic sampling compares one reward a completion, {advantage} reads {advantage.rewards_shape}: "
        "drop it (dynamic_sampling=None)",
    )
