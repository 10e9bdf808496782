"""DPO on rows with ``prompt``, ``chosen`` and ``rejected``; other losses of comparisons by their names."""

from pathlib import Path

import tyro

from rl_bridge import AdamW, Policy, Reference, Run, init, load_model, load_rows, preference_loss


def main(
    model: str,
    data: str,
    name: str = "preference",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    pairs_per_step: int = 64,
    lr: float = 5e-7,
    beta: float = 0.1,
) -> None:
    init()
    source, loss = load_model(model), preference_loss("dpo", beta=beta)
    rows = load_rows(data, source, loss)
    reference, policy = Reference(source), Policy(source, loss, AdamW(lr, total=steps))
    with Run(name, state=[policy, rows], output=output, resume=resume) as run:
        for _ in run.steps(steps):
            run.log(policy.update(reference.score(rows.batch(pairs_per_step))))
        policy.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
