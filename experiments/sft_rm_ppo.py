"""Demonstrations → reward model → PPO with a critic: three pipelines, each of which reads the folder of the one before.

python experiments/sft_rm_ppo.py --workers 4    # writes experiments/results/sft_rm_ppo/

The task is addition below 32 by a Qwen2 of 0.1 M parameters. Demonstrations are right sums. Preferences compare two
completions of the fine-tuned model itself, one right and one wrong. PPO never sees an answer: its reward is the reward
model's number, its critic begins as the reward model, and its penalty is the KL to the fine-tuned model. The true
reward, whether the sum is right, is measured beside it. PPO on the true reward shows what the reward model costs.
"""

import argparse
import json
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.policy_runs import ROWS, band, save, series
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.common.files import write_json
from rl_bridge.data.tasks import split_rows
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.models.pretrained import pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import KLOptions, objective_options
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_train.policy import run_policy
from rl_train.policy_options import CriticOptions, PolicyPipeline
from rl_train.reward_model import RewardModelPipeline, run_reward_model
from rl_train.sft import SFTPipeline, run_sft

RESULTS, RUNS = Path(__file__).parent / "results" / "sft_rm_ppo", Path("runs") / "sft_rm_ppo"
# Weights of (learned, right), and the coefficient of the KL.
SETTINGS: dict[str, tuple[tuple[float, float], float]] = {
    "learned reward, KL 1": ((1.0, 0.0), 1.0),
    "learned reward, KL 0.1": ((1.0, 0.0), 0.1),
    "true reward, KL 0.1": ((0.0, 1.0), 0.1),
}
TITLES = {
    "held_out/learned": "learned reward, held-out, greedy",
    "held_out/right": "right sums, held-out, greedy",
    "kl": "KL to the fine-tuned model, nats a token",
    "entropy": "entropy, nats a token",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What ``--short`` makes small."""

    held_out: int = 200
    sft_steps: int = 120
    completions: int = 32
    """Of each prompt, to compare."""
    reward_model_steps: int = 400
    steps: int = 100
    evaluate_every: int = 5
    only_own: bool = True
    """Compare only where the fine-tuned model itself writes the right sum, too. A short run's model writes none."""


SHORT = Sizes(sft_steps=2, completions=4, reward_model_steps=2, steps=2, evaluate_every=1, only_own=False)


def stage(run: Callable[[Any], Mapping[str, Any]], pipeline: Any) -> Mapping[str, Any]:
    """The summary of a pipeline, which runs, or goes on, if its folder has none yet."""
    folder = pipeline.output / pipeline.name
    if not (folder / "summary.json").exists():
        run(replace(pipeline, resume=(folder / "metrics.jsonl").exists()))
    return json.loads((folder / "summary.json").read_text("utf-8"))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A JSONL file of the rows, and its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def preferences(model: str, rows: list[dict[str, str]], seed: int, sizes: Sizes) -> list[dict[str, str]]:
    """For each prompt the right sum against each wrong one, up to eight, that ``model`` writes."""
    source, tokenizer = pretrained(model)
    engine = InferenceEngine(lambda: InProcessRollout(source, tokenizer), name=f"preferences-{seed}").build()
    made = engine.generate(
        [row["prompt"] for row in rows], SamplingParams(max_new_tokens=4, n=sizes.completions, seed=seed)
    )
    engine.release()
    found = []
    for number, row in enumerate(rows):
        said = [t.completion for t in made[sizes.completions * number :][: sizes.completions]]
        wrong = [text for text in dict.fromkeys(said) if text and text != row["answer"]][:8]
        if row["answer"] in said or not sizes.only_own:
            found += [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": text} for text in wrong]
    return found


def chain(seed: int, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """One seed: the three stages, with PPO once for each setting."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"output": folder, "seed": seed, "threads": 1, "checkpoint_every": 1000}
    rows, held_out = split_rows(ROWS, sizes.held_out, seed)
    held, problems = (
        write_rows(folder / f"{name}.jsonl", of) for name, of in {"held_out": held_out, "rows": rows}.items()
    )
    tokenizer = character_tokenizer("0123456789+=")
    if not (folder / "start").exists():
        tokenizer.save_pretrained(folder / "start")
        tiny_qwen2(tokenizer, hidden=64, layers=2, seed=seed).save_pretrained(folder / "start")
    sft = SFTPipeline(
        name="sft",
        model=str(folder / "start"),
        data=problems,
        eval_data=held,
        steps=sizes.sft_steps,
        rows_per_step=64,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup=20, decay="constant", beta2=0.99),
        **common,
    )
    done = {"sft": stage(run_sft, sft)}
    model, compared = str(folder / "sft" / "model"), folder / "preferences.jsonl"
    if not compared.exists():
        write_rows(compared, preferences(model, rows, seed, sizes))
    reward_model = RewardModelPipeline(
        name="reward-model",
        model=model,
        data=str(compared),
        held_out=150,
        steps=sizes.reward_model_steps,
        rows_per_step=64,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=10, final=0.1, beta2=0.99),
        **common,
    )
    done["reward_model"] = stage(run_reward_model, reward_model)
    learned, runs = str(folder / "reward-model" / "model"), {}
    for setting, (weights, coef) in SETTINGS.items():
        policy = PolicyPipeline(
            name=setting.replace(", ", "-").replace(" ", "_"),
            model=model,
            data=problems,
            eval_data=held,
            reward=(f"learned=model:{learned}", "right=exact"),
            reward_weights=weights,
            objective=objective_options("ppo", value_clip=0.2, kl=KLOptions(coef=coef, place="reward")),
            critic=CriticOptions(model=learned, optimizer=OptimizerConfig(learning_rate=1e-3, warmup=5, final=0.2)),
            policy=PolicyConfig(
                steps=sizes.steps,
                prompts_per_step=32,
                updates_per_step=2,
                evaluate_every=sizes.evaluate_every,
                critic_warmup=min(5, sizes.steps - 1),
                sampling=SamplingParams(n=8, max_new_tokens=4),
            ),
            optimizer=OptimizerConfig(learning_rate=5e-4, warmup=5, final=0.2, beta2=0.99),
            **common,
        )
        stage(run_policy, policy)
        lines = (folder / policy.name / "metrics.jsonl").read_text("utf-8").splitlines()
        runs[setting] = {"config": asdict(policy), "records": [json.loads(line) for line in lines]}
    return {"seed": seed, **done, "configs": {"sft": asdict(sft), "reward_model": asdict(reward_model)}, "runs": runs}


def draw(seeds: list[dict[str, Any]], folder: Path) -> None:
    """Learned reward, right sums, KL and entropy by step: mean of the seeds, band from least to most."""
    figure = Figure(figsize=(18, 4.3), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(1, 4), TITLES.items(), strict=True):
        for i, setting in enumerate(SETTINGS):
            band(axis, [of["runs"][setting] for of in seeds], metric, setting, f"C{i}", 1 if "/" in metric else 5)
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    save(figure, folder / "chain.png")


def results_of(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """What each stage came to in each seed, the configs of the first, and the curves as text, one line a seed."""
    kept = {"sft": ("nll_before", "nll_best", "steps"), "reward_model": ("after", "best_loss", "steps", "rows")}
    stages = [
        {"seed": of["seed"]} | {name: {k: of[name][k] for k in keys} for name, keys in kept.items()} for of in seeds
    ]
    curves: dict[str, Any] = {}
    for setting in SETTINGS:
        runs = [of["runs"][setting] for of in seeds]
        curves[setting] = {}
        for metric in ("reward/learned", "reward/right", *TITLES):
            steps, values = series(runs, metric)
            lines = [" ".join(f"{value:.4g}" for value in row) for row in values]
            curves[setting][metric] = {"steps": " ".join(map(str, steps.tolist())), "seeds": lines}
    configs = seeds[0]["configs"] | {setting: seeds[0]["runs"][setting]["config"] for setting in SETTINGS}
    return {"seeds": stages, "curves": curves, "configs": json.loads(json.dumps(configs, default=str))}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1, help="seeds at the same time, one thread each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--runs", type=Path, default=RUNS, help="stages that are there are not made again")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sizes = SHORT if arguments.short else Sizes()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        jobs = [pool.submit(chain, seed, sizes, arguments.runs / f"seed{seed}") for seed in range(arguments.seeds)]
        seeds = [job.result() for job in jobs]
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(seeds, arguments.output)
    write_json(arguments.output / "summary.json", {"sizes": asdict(sizes), **results_of(seeds)})


if __name__ == "__main__":
    main()
