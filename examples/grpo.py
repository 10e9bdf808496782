"""GRPO: copy me, change three lines, run me: with python, or over N processes with torchrun --nproc_per_node=N."""

from pathlib import Path

import tyro

import rl_fn
from rl_bridge import AdamW, Policy, Reference, Rollout, Run, SamplingParams, init, load_model, load_rows


def reward(completion: str, row: dict) -> float:
    return float(completion.strip().endswith(str(row["answer"])))


def main(
    model: str,
    data: str,
    name: str = "grpo",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    prompts: int = 32,
    n: int = 8,
    max_new_tokens: int = 512,
    lr: float = 1e-6,
) -> None:
    init()  # this process, the ranks of torchrun, or Ray
    source, rows = load_model(model), load_rows(data)
    objective = rl_fn.recipes.grpo().replace(kl=rl_fn.components.KL("k3", 0.02))
    rollout, reference = Rollout(source), Reference(source)
    policy = Policy(source, objective, AdamW(lr, warmup=10, total=steps))
    with Run(name, state=[policy, rows], output=output, resume=resume) as run:  # metrics, checkpoints, report
        for step in run.steps(steps):
            policy.sync_weights(rollout)  # proved, or the engine is replaced
            sampling = SamplingParams(n=n, max_new_tokens=max_new_tokens, seed=step)
            groups = rollout.generate(rows.take(prompts), sampling).score(reward)
            batch = reference.score(groups.batch()).with_advantages(objective)
            run.log(policy.update(batch), groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
