"""An Objective with the three things that libraries do and rl_fn's own recipes do not."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, as_float, as_mask
from rl_fn.aggregation import Ratio, aggregate_parts
from rl_fn.batch import Batch, sanitised
from rl_fn.dialects.advantages import TokenAdvantage, on_last_token
from rl_fn.objectives import Objective
from rl_fn.pieces import KL, Aggregation, describe

Rewards = Float[Array, "*batch G"]
GroupTokens = Float[Array, "*batch G T"]
GroupMask = Bool[Array, "*batch G T"]


@dataclasses.dataclass(frozen=True)
class DialectObjective(Objective):
    """An Objective whose KL or entropy may be averaged apart from the policy loss, and whose KL may be in the reward.

    `kl_aggregation` and `entropy_aggregation` are None where the term is averaged with the policy loss. Where they are
    not, micro-batches no longer add up exactly to the batch: neither do they in the library. `reward_kl` is β · kl
    between old_logprobs and ref_logprobs, taken off the rewards before advantages are computed.

    >>> import jax.numpy as jnp
    >>> from rl_fn import dialects
    >>> objective = dialects.openrlhf({"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.0})
    >>> objective.advantages(jnp.array([1.0, 0.0]), jnp.ones((2, 1), bool)).tolist()
    [[1.0], [-1.0]]
    """

    kl_aggregation: Aggregation | None = None
    entropy_aggregation: Aggregation | None = None
    reward_kl: KL | None = None

    def advantages(
        self,
        rewards: Rewards,
        mask: GroupMask,
        *,
        old_logprobs: GroupTokens | None = None,
        ref_logprobs: GroupTokens | None = None,
    ) -> GroupTokens:
        """Per-token advantages from one reward per answer; with a KL in the reward, log-probabilities are needed."""
        if not isinstance(self.advantage, TokenAdvantage):
            return super().advantages(rewards, mask)
        return self.advantage(rewards, mask, self.penalty(mask, old_logprobs, ref_logprobs))

    def penalty(
        self, mask: GroupMask, old_logprobs: GroupTokens | None, ref_logprobs: GroupTokens | None
    ) -> GroupTokens:
        """Return β · kl per token, what the library takes off the rewards; zero without a KL in the reward."""
        counted = as_mask(mask)
        zeros = jnp.zeros(counted.shape, jnp.float32)
        if self.reward_kl is None:
            return zeros
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError(f"{self.name} has {self.reward_kl} in the reward: give old_logprobs and ref_logprobs")
        old, ref = as_float(old_logprobs, ref_logprobs)
        batch = Batch(jnp.where(counted, old, 0.0), zeros, zeros, counted, ref_logprobs=jnp.where(counted, ref, 0.0))
        return jnp.where(counted, self.reward_kl.coef * self.reward_kl.estimate(batch), 0.0)

    def token_rewards(
        self,
        rewards: Rewards,
        mask: GroupMask,
        *,
        old_logprobs: GroupTokens | None = None,
        ref_logprobs: GroupTokens | None = None,
    ) -> GroupTokens:
        """Return the reward on each answer's last counted token, less β · kl on every one: a critic's input."""
        (r,) = as_float(rewards)
        return on_last_token(r, as_mask(mask)) - self.penalty(mask, old_logprobs, ref_logprobs)

    def parts(self, batch: Batch) -> tuple[Ratio, dict[str, Ratio]]:
        """Undivided loss and metrics; see Objective.parts."""
        if self.kl_aggregation is None and self.entropy_aggregation is None:
            return super().parts(batch)
        self.check(batch)
        joined = dataclasses.replace(
            self,
            kl=None if self.kl_aggregation else self.kl,
            entropy=None if self.entropy_aggregation else self.entropy,
            kl_aggregation=None,
            entropy_aggregation=None,
        )
        loss, metrics = joined.parts(batch)
        b = sanitised(batch)
        apart = jnp.zeros_like(loss.total)
        if self.kl is not None and self.kl_aggregation is not None:
            kl = self.kl.estimate(b)
            metrics["kl"] = aggregate_parts(jax.lax.stop_gradient(kl), b.mask, "token-mean")
            apart = apart + self.kl.coef * self.kl_aggregation(kl, b.mask, b.segment_ids).value()
        if self.entropy is not None and self.entropy_aggregation is not None:
            assert b.entropies is not None
            entropy = self.entropy_aggregation(jnp.asarray(b.entropies), b.mask, b.segment_ids)
            apart = apart - self.entropy.coef * entropy.value()
        # A term that is already divided joins as apart · denominator; a denominator of 0 divides by nothing.
        scale = jnp.where(loss.denominator == 0, 1.0, loss.denominator)
        return Ratio(loss.total + apart * scale, loss.denominator), metrics

    def explain(self) -> str:
        """Return the equation with its constants, one line a piece."""
        lines = [super().explain()]
        named = {"kl averaged by": self.kl_aggregation, "H averaged by": self.entropy_aggregation}
        lines += [f"  {name} {describe(piece)}" for name, piece in named.items() if piece is not None]
        if self.reward_kl is not None:
            lines.append(f"  reward less {self.reward_kl.coef:g}·kl, kl = {describe(self.reward_kl)}")
        return "\n".join(lines)
