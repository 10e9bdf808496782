"""Policy optimisation with verifiable rewards on groups of completions: GRPO, DAPO, RLOO …, by the objective."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.data.stream import RowStream
from rl_bridge.data.token_batch import collate
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.functional import from_jax
from rl_bridge.rewards import Reward, score
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.modules.policy import mean
from rl_bridge.trainers.policy_config import PolicyConfig, SamplingOptions
from rl_fn import Objective, Rollouts


def train_policy(
    run: Run,
    policy: TrainEngine,
    rollout: InferenceEngine,
    stream: RowStream,
    reward: Reward,
    objective: Objective,
    config: PolicyConfig,
    *,
    held_out: Sequence[dict],
    reference: TrainEngine | None = None,
    pad_token_id: int,
    seed: int,
) -> None:
    """Sample, score, compare within groups, update; every step is logged, checkpointed when due, and resumable."""
    require_same_scoring(policy, reference, config.sampling)
    if objective.over_batch and policy.mesh.data_parts > 1:
        raise ValueError(
            f"{objective.name} reads statistics of the whole batch, which is split over {policy.mesh.data_parts} "
            f"workers ({policy.mesh}): train it with replicate=1 and shard=1"
        )
    advantages_of, selection_of = from_jax(objective.advantages), from_jax(objective.selection)
    denominator_of = from_jax(objective.denominator)
    state = {"policy": policy, "stream": stream} | ({} if reference is None else {"reference": reference})
    for step in run.steps("policy", config.steps, state=state):
        policy.sync_weights(rollout)
        rows = stream.take(config.prompts_per_step)
        sampling = config.sampling.params(n=config.responses_per_prompt, seed=seed * 1_000_003 + step)
        trajectories = score(reward, rollout.generate([row["prompt"] for row in rows], sampling), rows)
        rewards = torch.tensor([t.rewards["reward"] for t in trajectories]).view(len(rows), sampling.n)

        batch = collate(trajectories, pad_token_id)
        of_group: Any = (rewards, batch.mask.view(*rewards.shape, -1))
        rollouts = Rollouts(*of_group)
        advantages = advantages_of(rollouts).advantages
        computed, counted = selection_of(rollouts, advantages)
        batch = batch._replace(advantages=advantages.flatten(0, 1), old_logprobs=batch.rollout_logprobs)
        metrics = {"reward": float(rewards.mean()), "tokens": float(batch.mask.sum(1).float().mean())}
        metrics["informative"] = float(computed.float().mean())
        processed = int(batch.lengths.sum())

        parts = list(minibatches_of(computed.flatten(), counted.flatten(0, 1), config.updates_per_step))
        denominators = [float(denominator_of(mask)) for _, mask in parts]
        minibatches = [batch.rows(index) for index, _ in parts]
        if config.recompute_old_logprobs:  # all of them before any update of this step
            minibatches = [m._replace(old_logprobs=policy.token_logprobs(NeedParallel(m))) for m in minibatches]
        for minibatch, denominator in zip(minibatches, denominators, strict=True):
            if reference is not None:
                # Cut into the same micro-batches as the policy's own: equal weights give equal bits.
                minibatch = minibatch._replace(ref_logprobs=reference.token_logprobs(NeedParallel(minibatch)))
            totals = policy.train_step(NeedParallel(minibatch), denominator)
            metrics |= {name: mean(value) for name, value in totals.items()} | policy.optimizer_step()
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            policy.sync_weights(rollout)
            metrics["held_out"] = evaluate(rollout, held_out, reward, config.sampling)["reward"]
        run.log(step, metrics, tokens=processed)


def require_same_scoring(policy: TrainEngine, reference: TrainEngine | None, sampling: SamplingOptions) -> None:
    """Refuse a policy or a reference that computes another distribution than the completions are sampled from."""
    scoring = policy.scoring_config()
    if scoring.temperature != sampling.temperature:
        raise ValueError(
            f"completions are sampled at temperature {sampling.temperature}, the policy is scored at "
            f"{scoring.temperature}: no ratio would start at 1"
        )
    if reference is not None and reference.scoring_config() != scoring:
        raise ValueError(
            f"the policy is scored with {scoring}, the reference with {reference.scoring_config()}: "
            "the KL of a model to its own copy would not be 0"
        )


def minibatches_of(
    computed: torch.Tensor, counted: torch.Tensor, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut an objective's ``selection`` into ``count`` shares: rows to compute, and the mask that a share counts.

    ``computed`` is [N], ``counted`` is [N, T]. A share without a row to compute has no gradient and makes no update.
    """
    for share in counted.any(1).nonzero()[:, 0].tensor_split(count):
        index = share[computed[share]]
        if len(index):
            yield index, counted[share]


def evaluate(
    rollout: InferenceEngine,
    rows: Sequence[dict],
    reward: Reward,
    sampling: SamplingOptions,
    *,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """One completion of each of ``rows``, greedy by default: the mean reward, each score, and the first few to read."""
    once = replace(sampling, temperature=temperature).params()
    trajectories = score(reward, rollout.generate([row["prompt"] for row in rows], once), rows)
    scores = [t.rewards["reward"] for t in trajectories]
    samples = [
        {"prompt": t.row["prompt"], "completion": t.completion, "answer": t.row.get("answer"), **t.rewards}
        for t in trajectories[:16]
    ]
    return {"reward": sum(scores) / len(scores), "scores": scores, "samples": samples}
