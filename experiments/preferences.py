"""DPO and its kin on synthetic preferences whose optimum is known, and a reward model against the true reward.

python experiments/preferences.py            # writes experiments/results/preferences/{summary.json,gap.png}
python experiments/preferences.py --short    # a tenth of the steps and one seed, to see that it works

A prompt is one of 4 letters, a completion one of 64 strings; preference_world.py has their true rewards r(x, y). The
reference is a small Qwen2, fine-tuned to write such strings. Pairs are drawn uniformly, and labelled by Bradley and
Terry's model of r. Then max E[r] − β KL(π‖π_ref) has the solution π* ∝ π_ref exp(r/β): what DPO reaches with labels
without end. IPO has another one, π* ∝ π_ref exp(p/τ), where p(x, y) is the chance to beat a uniform draw. Every policy
is scored on all completions of all prompts, so that its KL to π* is exact. Its objective is β KL(π‖π*) short of the
maximum.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.preference_results import markdown, plot, table
from experiments.preference_world import (
    BETA,
    COMPLETIONS,
    EOS,
    PAD,
    PROMPTS,
    World,
    every_completion,
    examples_for,
    kl,
    normalised,
    pairs_of,
    trajectory,
    true_rewards,
)
from rl_bridge.algorithms.comparison_training import BatchStatistics, comparison_update, with_reference
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.examples import batch_of
from rl_bridge.data.rows import RowStream
from rl_bridge.data.token_batch import collate
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.models.model_source import StateSource, ValueSource
from rl_bridge.models.small import TinySource
from rl_bridge.modules.comparison import ComparisonLoss, CompletionScorer, PreferenceModule, RewardModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_train.compared import loss_options

OUT = Path(__file__).parent / "results" / "preferences"
# Rows of five tokens have little to share.
SCORING = ScoringConfig(share_prefixes=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    seeds: int = 3
    pairs: int = 20_000
    steps: int = 400
    rows_per_step: int = 128
    evaluate_every: int = 20
    supervised_steps: int = 150
    learning_rate: float = 2e-3
    flipped: float = 0.15


# At small rewards IPO with τ = β/4 pulls to its reference as DPO with β does.
METHODS: dict[str, dict[str, Any]] = {
    "DPO": {"loss": "dpo", "beta": BETA},
    "IPO": {"loss": "ipo", "beta": BETA / 4},
    "EXO": {"loss": "exo", "beta": BETA},
    "BCO": {"loss": "bco", "beta": BETA},
    "KTO": {"loss": "kto", "beta": BETA},
    "SimPO": {"loss": "simpo"},
    "DPO, flipped labels": {"loss": "dpo", "beta": BETA, "noisy": True},
    "robust DPO, flipped labels": {"loss": "dpo_robust", "beta": BETA, "label_smoothing": 0.15, "noisy": True},
}


def logprobs_of(policy: TrainEngine, everything: PairBatch) -> np.ndarray:
    found = policy.completion_logprobs(NeedParallel(everything))
    return found.double().numpy().reshape(len(PROMPTS), len(COMPLETIONS))


def optimizer(settings: Settings) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=settings.learning_rate, warmup=10, final=0.05, beta2=0.99)


def supervised(settings: Settings, seed: int) -> StateSource:
    """A model that writes strings of three letters, some of them more often than others."""
    generator = np.random.default_rng([seed, 1])
    odds = normalised(0.5 * generator.normal(size=(len(PROMPTS), len(COMPLETIONS))))
    source = TinySource(vocabulary=10, pad_token=PAD, eos_token=EOS, hidden=32, layers=2, seed=seed)
    engine = TrainEngine(
        lambda: SupervisedModule(source, optimizer(settings), updates=settings.supervised_steps, scoring=SCORING),
        name=f"sft{seed}",
    ).build()
    for _ in range(settings.supervised_steps):
        chosen = generator.integers(len(PROMPTS), size=512)
        rows = [trajectory(PROMPTS[x], COMPLETIONS[generator.choice(len(COMPLETIONS), p=odds[x])]) for x in chosen]
        batch = collate(rows, PAD)
        engine.train_step(NeedParallel(batch), float(batch.mask.sum()))
        engine.optimizer_step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_pretrained(folder)
        engine.release()
        from transformers import Qwen2ForCausalLM

        return StateSource(Qwen2ForCausalLM.from_pretrained(folder).float().eval())


def measure(policy: TrainEngine, everything: PairBatch, world: World) -> dict[str, float]:
    """Exact, over all completions; ``mass`` is the probability of writing one of the 64."""
    logprobs = logprobs_of(policy, everything)
    pi = normalised(logprobs)
    return {
        "kl_to_optimum": kl(pi, world.optimum()),
        "kl_to_optimum_of_ipo": kl(pi, world.optimum_of_ipo()),
        "kl_to_reference": kl(pi, world.reference),
        "reward": float((pi * world.rewards).sum(-1).mean()),
        "mass": float(np.exp(logprobs).sum(-1).mean()),
    }


def learn(
    settings: Settings,
    model: TrainEngine,
    loss: ComparisonLoss,
    stream: RowStream,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """The updates of a method, measured now and then and at the end."""
    statistics = BatchStatistics(loss)
    for step in range(1, settings.steps + 1):
        comparison_update(model, loss, batch_of(stream.take(settings.rows_per_step), PAD), statistics)
        if step % settings.evaluate_every == 0 or step == settings.steps:
            evaluate()


def run_method(settings: Settings, name: str, seed: int, source: StateSource, world: World) -> dict[str, Any]:
    options = dict(METHODS[name])
    noisy, loss = options.pop("noisy", False), loss_options(options.pop("loss"), **options).build()
    pairs = pairs_of(world, settings.pairs, seed, settings.flipped if noisy else 0.0)
    examples, everything, started = examples_for(loss, pairs), every_completion(), time.monotonic()
    if loss.needs_reference:
        reference = TrainEngine(lambda: CompletionScorer(source, SCORING), name=f"reference {name} {seed}").build()
        examples = with_reference(examples, reference, PAD)
        reference.release()
    fixed: dict[str, Any] = {"updates": settings.steps, "scoring": SCORING}
    made = partial(PreferenceModule, source, optimizer(settings), loss, **fixed)
    policy, curve = TrainEngine(made, name=f"{name} {seed}").build(), []

    def evaluate() -> dict[str, float]:
        found = measure(policy, everything, world)
        curve.append(found)
        return found

    evaluate()
    learn(settings, policy, loss, RowStream(examples, seed=seed), evaluate)
    policy.release()
    return {"method": name, "seed": seed, "curve": curve, "seconds": round(time.monotonic() - started, 1)}


def run_reward_model(settings: Settings, seed: int, source: StateSource, world: World) -> dict[str, Any]:
    """Bradley–Terry on the pairs without flipped labels, from the fine-tuned model's trunk."""
    loss, everything, started = loss_options("bradley_terry").build(), every_completion(), time.monotonic()
    pairs = pairs_of(world, settings.pairs, seed, 0.0)
    held_out = pairs_of(world, 4000, seed + 1000, 0.0)
    fixed: dict[str, Any] = {"updates": settings.steps, "scoring": SCORING}
    made = partial(RewardModule, ValueSource(source, seed=seed), optimizer(settings), loss, **fixed)
    model, curve = TrainEngine(made, name=f"rewards {seed}").build(), []

    def evaluate() -> dict[str, float]:
        scores = model.scores(NeedParallel(everything.completions)).double().numpy().reshape(world.rewards.shape)
        centred, true = (x - x.mean(-1, keepdims=True) for x in (scores, world.rewards))
        ordered = np.sign(scores[:, :, None] - scores[:, None, :])
        right = ordered == np.sign(world.rewards[:, :, None] - world.rewards[:, None, :])
        off = ~np.eye(len(COMPLETIONS), dtype=bool)
        found = {
            "accuracy_of_labels": float(np.mean([scores[x, good] > scores[x, bad] for x, good, bad in held_out])),
            "accuracy_of_order": float(right[:, off].mean()),
            "correlation": float(np.corrcoef(centred.ravel(), true.ravel())[0, 1]),
            "rms_error": float(np.sqrt(np.mean((centred - true) ** 2))),
            "best_of_64": float(np.take_along_axis(world.rewards, scores.argmax(-1)[:, None], -1).mean()),
        }
        curve.append(found)
        return found

    evaluate()
    learn(settings, model, loss, RowStream(examples_for(loss, pairs), seed=seed), evaluate)
    model.release()
    best_possible = np.mean([world.rewards[x, good] > world.rewards[x, bad] for x, good, bad in held_out])
    seconds = round(time.monotonic() - started, 1)
    best = {"accuracy_of_labels": float(best_possible), "best_of_64": float(world.rewards.max(-1).mean())}
    return {"method": "reward model", "seed": seed, "curve": curve, "true": best, "seconds": seconds}


def world_of(job: tuple[Settings, int]) -> tuple[StateSource, World]:
    """The reference of a seed, and its true rewards."""
    settings, seed = job
    torch.set_num_threads(1)
    source = supervised(settings, seed)
    reward = true_rewards(seed)
    scorer = TrainEngine(lambda: CompletionScorer(source, SCORING), name=f"scorer {seed}").build()
    world = World(reward, normalised(logprobs_of(scorer, every_completion())))
    scorer.release()
    return source, world


def run_job(job: tuple[Settings, str, int, StateSource, World]) -> dict[str, Any]:
    settings, name, seed, source, world = job
    torch.set_num_threads(1)
    if name in METHODS:
        return run_method(settings, name, seed, source, world)
    return run_reward_model(settings, seed, source, world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a tenth of the steps, one seed; writes nothing")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    settings = Settings(seeds=1, pairs=2000, steps=30, supervised_steps=20) if options.short else Settings()
    started, seeds = time.monotonic(), range(settings.seeds)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        worlds = pool.map(world_of, [(settings, seed) for seed in seeds], chunksize=1)
        names = [*METHODS, "reward model"]
        jobs = [(settings, name, seed, *worlds[seed]) for name in names for seed in seeds]
        results = pool.map(run_job, jobs, chunksize=1)
    rows = table(results)
    print(markdown(rows))
    print(json.dumps(rows[-1]["last"]))
    if options.short:
        return
    OUT.mkdir(parents=True, exist_ok=True)
    summary = {
        "command": "python experiments/preferences.py",
        "beta": BETA,
        "settings": asdict(settings),
        "methods": METHODS,
        "versions": {name: version(name) for name in ("torch", "transformers", "jax")},
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        "results": results,
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    noisy = [name for name, options in METHODS.items() if options.get("noisy")]
    plot(results, list(METHODS), noisy, asdict(settings), OUT / "gap.png")


if __name__ == "__main__":
    main()
