"""A language model of 1 M parameters learns two-digit addition by GRPO: supervised steps, then rewards.

    python experiments/quickstart.py                              # minutes on two cores
    torchrun --nproc_per_node=2 experiments/quickstart.py         # the same on two ranks

The command ``rl-fn train policy`` without ``--model`` has the same numbers, to the bit.
"""

from pathlib import Path

import tyro

import rl_fn
from rl_bridge import NLL, AdamW, Policy, Rollout, Run, SamplingParams, init, load_rows, tiny_model

PROBLEMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]


def reward(completion: str, row: dict) -> float:
    return float(completion.strip() == row["answer"])


def main(
    name: str = "quickstart",
    output: Path = Path("runs"),
    resume: bool = False,
    seed: int = 0,
    held_out: int = 600,
    warm_steps: int = 135,
    warm_rows: int = 256,
    steps: int = 240,
    prompts: int = 192,
    n: int = 4,
    evaluate_every: int = 20,
    checkpoint_every: int = 50,
) -> None:
    init()  # this process, the ranks of torchrun, or Ray
    rows, problems = load_rows(PROBLEMS, seed=seed).hold_out(held_out)
    model = tiny_model(PROBLEMS, seed=seed)
    objective = rl_fn.recipes.dapo()
    # The warm start ends at its full rate, before the model has learned the task.
    warm = Policy(model, NLL(), AdamW(2e-3, warmup=50, beta2=0.99))
    policy = Policy(model, objective, AdamW(1.5e-4, warmup=10, total=2 * steps, final=0.2, beta2=0.99))
    rollout = Rollout(model)

    def evaluate() -> dict[str, float]:
        """Mean reward of the problems that are held out, greedily, with its interval."""
        greedy = SamplingParams(max_new_tokens=5, temperature=0.0, seed=seed)
        return rollout.generate(problems, greedy).score(reward).held_out()

    options = {"output": output, "resume": resume, "checkpoint_every": checkpoint_every}
    with Run(name, state=[warm, policy, rows], **options) as run:  # metrics, checkpoints, report
        run.keep_best("held_out")
        for _ in run.steps(warm_steps, [warm, rows]):
            run.log(warm.update(rows.take(warm_rows)))
        for target in (policy, rollout):
            warm.sync_weights(target)
        before = run.once("before", evaluate)
        run.print(f"held-out accuracy before reinforcement learning: {before['held_out']:.3f}")
        for step in run.steps(steps, [policy, rows]):
            policy.sync_weights(rollout)  # proved, or the engine is replaced
            sampling = SamplingParams(n=n, max_new_tokens=5, seed=1_000_003 * seed + step)
            groups = rollout.generate(rows.take(prompts), sampling).score(reward)
            update = policy.update(groups.batch().with_advantages(objective), updates=2)
            due = (step + 1) % evaluate_every == 0 or step + 1 == steps
            if due:
                policy.sync_weights(rollout)
            run.log(update, groups, evaluate() if due else {})
        policy.sync_weights(rollout)  # a run that is resumed after its last step has synchronised no weights
        policy.save(run.folder / "model")
        first, last = before["held_out"], evaluate()["held_out"]
        run.finish(f"held-out accuracy {first:.2f} → {last:.2f}", accuracy_before=first, accuracy_after=last)


if __name__ == "__main__":
    tyro.cli(main)
