"""GRPO over conversations with tools: the policy calls functions, reads what they return, and goes on."""

from pathlib import Path

import tyro

import rl_fn
from rl_bridge import AdamW, Policy, Rollout, Run, SamplingParams, init, load_model, load_rows


def multiply(a: int, b: int) -> int:
    """
    Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def reward(completion: str, row: dict) -> float:
    return float(completion.strip().endswith(str(row["answer"])))


def main(
    model: str,
    data: str,
    name: str = "conversations",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    prompts: int = 32,
    n: int = 8,
    max_turns: int = 4,
    max_new_tokens: int = 512,
    lr: float = 1e-6,
) -> None:
    init()
    source, rows, objective = load_model(model), load_rows(data), rl_fn.recipes.dapo()
    rollout, policy = Rollout(source), Policy(source, objective, AdamW(lr, warmup=10, total=steps))
    with Run(name, state=[policy, rows], output=output, resume=resume) as run:
        for step in run.steps(steps):
            policy.sync_weights(rollout)
            sampling = SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=step)
            groups = rollout.converse(rows.take(prompts), sampling, tools=[multiply], max_turns=max_turns).score(reward)
            run.log(policy.update(groups.batch().with_advantages(objective)), groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
