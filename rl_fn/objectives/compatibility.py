"""Combinations of components that cannot mean what they say: each is refused with the reason and the remedy."""

from typing import TYPE_CHECKING

from rl_fn._numerics import require

if TYPE_CHECKING:
    from rl_fn.objectives.objective import Objective


def check_compatible(o: "Objective") -> None:
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
