"""Supervised fine-tuning on rows with ``messages``, or with ``prompt`` and ``response``."""

from pathlib import Path

import tyro

from rl_bridge import NLL, AdamW, Policy, Run, init, load_model, load_rows


def main(
    model: str,
    data: str,
    name: str = "sft",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    rows_per_step: int = 64,
    lr: float = 1e-5,
) -> None:
    init()
    source = load_model(model)
    rows = load_rows(data, source, NLL())
    policy = Policy(source, NLL(), AdamW(lr, total=steps))
    with Run(name, state=[policy, rows], output=output, resume=resume) as run:
        for _ in run.steps(steps):
            run.log(policy.update(rows.batch(rows_per_step)))
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
