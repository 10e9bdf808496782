"""An Objective with the two things that libraries do and rl_fn's own recipes do not."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array
from rl_fn.aggregation import Ratio, aggregate_parts
from rl_fn.objectives.batch import Batch, sanitised
from rl_fn.objectives.components import Aggregation, describe
from rl_fn.objectives.dialects.advantages import TokenAdvantage
from rl_fn.objectives.objective import Objective

Rewards = Float[Array, "*batch G"]
GroupTokens = Float[Array, "*batch G T"]
GroupMask = Bool[Array, "*batch G T"]


@dataclasses.dataclass(frozen=True)
class DialectObjective(Objective):
    """An Objective whose KL or entropy may be averaged apart from the policy loss.

    `kl_aggregation` and `entropy_aggregation` are None where the term is averaged with the policy loss. Where they are
    not, micro-batches no longer add up exactly to the batch: neither do they in the library. The advantage may be one
    that needs tokens (TokenAdvantage): it is given the penalty of reward_kl token by token.

    >>> import jax.numpy as jnp
    >>> from rl_fn import dialects
    >>> objective = dialects.openrlhf({"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.0})
    >>> objective.advantages(jnp.array([1.0, 0.0]), jnp.ones((2, 1), bool)).tolist()
    [[1.0], [-1.0]]
    """

    kl_aggregation: Aggregation | None = None
    entropy_aggregation: Aggregation | None = None

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
            return super().advantages(rewards, mask, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
        return self.advantage(rewards, mask, self.penalty(mask, old_logprobs, ref_logprobs))

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
        return "\n".join(lines)
