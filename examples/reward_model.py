"""A reward model of compared completions, which other loops take as ``groups.score("model:FOLDER")``."""

from pathlib import Path

import tyro

from rl_bridge import AdamW, RewardModel, Run, init, load_model, load_rows, preference_loss


def main(
    model: str,
    data: str,
    name: str = "reward-model",
    output: Path = Path("runs"),
    resume: bool = False,
    steps: int = 200,
    pairs_per_step: int = 64,
    lr: float = 1e-5,
) -> None:
    init()
    source, loss = load_model(model), preference_loss("bradley_terry")
    rows = load_rows(data, source, loss)  # before the model: the rows choose the token that pads
    judge = RewardModel(source, loss, AdamW(lr, total=steps))
    with Run(name, state=[judge, rows], output=output, resume=resume) as run:
        for _ in run.steps(steps):
            run.log(judge.update(rows.batch(pairs_per_step)))
        judge.save(run.folder / "model")


if __name__ == "__main__":
    tyro.cli(main)
