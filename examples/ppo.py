"""PPO with a critic: the policy learns from what a completion earned beyond the critic's value of its state."""

from pathlib import Path

import tyro

import rl_fn
from rl_bridge import AdamW, Critic, Policy, Rollout, Run, SamplingParams, init, load_model, load_rows


def reward(completion: str, row: dict) -> float:
    return float(completion.strip().endswith(str(row["answer"])))


def main(
    model: str,
    data: str,
    name: str = "ppo",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    prompts: int = 256,
    max_new_tokens: int = 512,
    updates: int = 4,
    lr: float = 1e-6,
    critic_lr: float = 1e-5,
    critic_warmup: int = 10,
) -> None:
    if steps <= critic_warmup:
        raise ValueError(f"--steps {steps} with --critic-warmup {critic_warmup}: the policy would never be updated")
    init()
    source, rows, objective = load_model(model), load_rows(data), rl_fn.recipes.ppo()
    rollout = Rollout(source)
    policy = Policy(source, objective, AdamW(lr, total=updates * (steps - critic_warmup)))
    critic = Critic(source, objective, AdamW(critic_lr, total=updates * steps))
    with Run(name, state=[policy, critic, rows], output=output, resume=resume) as run:
        for step in run.steps(steps):
            policy.sync_weights(rollout)
            sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=step)
            groups = rollout.generate(rows.take(prompts), sampling).score(reward)
            batch = critic.score(groups.batch()).with_advantages(objective)
            metrics = critic.update(batch, updates=updates)
            if step >= critic_warmup:
                metrics |= policy.update(batch, updates=updates)
            run.log(metrics, groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
