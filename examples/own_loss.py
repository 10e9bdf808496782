"""A loss of your own in PyTorch, and a reference that follows the policy."""

from pathlib import Path

import torch
import tyro

import rl_fn
from rl_bridge import AdamW, Policy, Reference, Rollout, Run, SamplingParams, init, load_model, load_rows, torch_loss


@torch_loss(reads=("old_logprobs", "advantages"))
def loss(batch):
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)


def reward(completion: str, row: dict) -> float:
    return float(completion.strip().endswith(str(row["answer"])))


def main(
    model: str,
    data: str,
    name: str = "own_loss",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    prompts: int = 32,
    n: int = 8,
    max_new_tokens: int = 512,
    reference_every: int = 20,
    lr: float = 1e-6,
) -> None:
    init()
    source, rows = load_model(model), load_rows(data)
    objective = rl_fn.recipes.grpo().replace(loss=loss, kl=rl_fn.components.KL("k3", 0.02))
    rollout, reference = Rollout(source), Reference(source)
    policy = Policy(source, objective, AdamW(lr, warmup=10, total=steps))
    with Run(name, state=[policy, reference, rows], output=output, resume=resume) as run:
        for step in run.steps(steps):
            policy.sync_weights(rollout)
            if step and step % reference_every == 0:
                policy.sync_weights(reference)
            sampling = SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=step)
            groups = rollout.generate(rows.take(prompts), sampling).score(reward)
            batch = reference.score(groups.batch()).with_advantages(objective)
            run.log(policy.update(batch), groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
