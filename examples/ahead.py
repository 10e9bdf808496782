"""DAPO with rollouts that run ahead of training: the next step's completions are drawn while this one is trained on."""

from pathlib import Path

import tyro

import rl_fn
from rl_bridge import AdamW, Ahead, Policy, Rollout, Run, SamplingParams, init, load_model, load_rows


def reward(completion: str, row: dict) -> float:
    return float(completion.strip().endswith(str(row["answer"])))


def main(
    model: str,
    data: str,
    name: str = "ahead",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    prompts: int = 32,
    n: int = 8,
    max_new_tokens: int = 512,
    max_staleness: int = 1,
    rollout_workers: int | None = None,  # processes that draw and do not train
    lr: float = 1e-6,
) -> None:
    init()
    source, rows = load_model(model), load_rows(data)
    objective = rl_fn.recipes.dapo().replace(correction=rl_fn.components.TIS(2.0))  # weighs by π_old / μ
    rollout = Rollout(source, workers=rollout_workers)
    apart_from = [rollout] if rollout_workers else []
    policy = Policy(source, objective, AdamW(lr, warmup=10, total=steps), apart_from=apart_from)
    sampling = SamplingParams(n=n, max_new_tokens=max_new_tokens)
    ahead = Ahead(rollout, policy, rows, reward, sampling, prompts=prompts, steps=steps, max_staleness=max_staleness)
    with ahead, Run(name, state=[policy, ahead], output=output, resume=resume) as run:
        for _ in run.steps(steps):
            groups = ahead.groups()
            batch = policy.score(groups.batch()).with_advantages(objective)  # π_old of the weights that train
            run.log(policy.update(batch), groups)
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
