"""Many short runs of the policy trainer on one small task: resumable one by one, over processes, drawn with bands.

The task is addition of two numbers below 32 by a Qwen2 of 0.1 M parameters after a short warm start. One run is one
(setting, seed); its record is a file under ``runs/``, and a run whose file is there is not made again. The results have
the figure, and summary.json with each setting's config, its ends, and the curves of a few metrics.
"""

import argparse
import json
import logging
import multiprocessing
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.machine import facts
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.common.files import replacing, write_json
from rl_bridge.data.tasks import split_rows
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.loop.data import Model
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.rewards import Reward, exact_match
from rl_train.policy import run_policy
from rl_train.policy_inputs import PolicyInputs
from rl_train.policy_options import CriticOptions, PolicyPipeline, WarmStart

RESULTS = Path(__file__).parent / "results"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(32) for b in range(32)]
STEPS, HELD_OUT, HEADS = 120, 200, 4
CURVES = ("reward", "held_out", "held_out/right", "held_out/small", "entropy", "entropy_coef", "kl", "kl_coef")
CURVES += ("mismatch/k3", "mismatch/probability_gap_mean", "mismatch/effective_sample_share", "corrected/changed_share")
"""Metrics whose curves the results have."""
Made = dict[str, Any]
"""What is kept of a run."""
Settings = Mapping[str, tuple[dict[str, Any], Reward]]
"""Name → (options of the pipeline, ``heads`` and ``source`` (a class) of the model; reward)."""


def pipeline_of(options: Mapping[str, Any], *, name: str, output: Path, seed: int, steps: int) -> PolicyPipeline:
    """The pipeline of one run; ``options`` are over the task's own, those of ``policy`` one by one."""
    warm = OptimizerConfig(learning_rate=3e-3, warmup=20, decay="constant", beta2=0.99)
    policy: dict[str, Any] = {"steps": steps, "prompts_per_step": 32}
    policy |= {"sampling": SamplingParams(n=8, max_new_tokens=4), "updates_per_step": 2, "evaluate_every": 5}
    chosen = dict(options)
    policy |= chosen.pop("policy", {})
    common: dict[str, Any] = {
        "sft": WarmStart(steps=200, rows_per_step=64, optimizer=warm),
        "optimizer": OptimizerConfig(learning_rate=5e-4, warmup=5, final=0.2, beta2=0.99),
        "held_out": HELD_OUT,
        "threads": 1,
        "checkpoint_every": 1000,
    }
    if getattr(chosen.get("objective"), "algorithm", "") in ("ppo", "vapo"):
        common["critic"] = CriticOptions(optimizer=OptimizerConfig(learning_rate=2e-3, warmup=5, decay="constant"))
    common |= {"resume": (output / name).exists(), "policy": PolicyConfig(**policy)}
    return PolicyPipeline(name=name, output=output, seed=seed, **common | chosen)


def run_one(options: Mapping[str, Any], reward: Reward, name: str, seed: int, steps: int, folder: Path) -> Made:
    """One run in this process: its config, its records and its summary."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = dict(options)
    heads, kind = chosen.pop("heads", HEADS), chosen.pop("source", TinySource)
    pipeline = pipeline_of(chosen, name=f"{name}-{seed}", output=folder, seed=seed, steps=steps)
    tokenizer = character_tokenizer("0123456789+=")
    source = kind.for_tokenizer(tokenizer, hidden=64, layers=2, heads=heads, seed=seed)
    train, held_out = split_rows(ROWS, HELD_OUT, seed)
    inputs = Model(source, tokenizer), train, held_out, reward
    summary = run_policy(pipeline, read=lambda options: PolicyInputs.of(options, *inputs))
    lines = (folder / pipeline.name / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["stage"] == "policy"]
    archive = folder / pipeline.name / "pareto.json"
    pareto = json.loads(archive.read_text("utf-8")) if archive.exists() else None
    shutil.rmtree(folder / pipeline.name)
    kept = {key: summary[key] for key in ("accuracy_before", "accuracy_after", "gain", "seconds", "objective")}
    return {
        "config": asdict(pipeline) | {"model": asdict(source)},
        "summary": kept,
        "records": records,
        "pareto": pareto,
    }


def experiment(
    name: str,
    settings: Settings,
    draw: Callable[[dict[str, list[Made]], Path], None],
    description: str | None,
    *,
    make: Callable[..., Made] | None = None,
    steps: int = STEPS,
    seeds: int = 3,
) -> None:
    """The command line of an experiment: make what is missing, then draw everything that is there.

    ``make``: what makes one run where it is not ``run_one``, with the same arguments. ``steps``, ``seeds``: defaults.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    folder, kept = arguments.output / name, Path("runs") / f"{name}-{arguments.steps}-steps"
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    numbers = range(arguments.seeds)
    files = {(s, seed): kept / f"{s.replace(' ', '_')}-{seed}.json" for s in settings for seed in numbers}
    missing = [place for place, file in files.items() if not file.exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        jobs = {
            pool.submit(make or run_one, *settings[s], s.replace(" ", "_"), seed, arguments.steps, kept): (s, seed)
            for s, seed in missing
        }
        for job in as_completed(jobs):
            setting, seed = jobs[job]
            found = job.result()
            write_json(files[setting, seed], json.loads(json.dumps(found, default=str)))
            done = found["summary"]
            print(f"{setting}, seed {seed}: {done['accuracy_before']:.3f} → {done['accuracy_after']:.3f}", flush=True)
    runs = {s: [json.loads(files[s, seed].read_text("utf-8")) for seed in numbers] for s in settings}
    draw(runs, folder)
    found = {s: results_of(of) for s, of in runs.items()}
    summary = {"steps": arguments.steps, "seeds": arguments.seeds, "drawn_on": facts(), "settings": found}
    write_json(folder / "summary.json", summary)


def results_of(runs: list[Made]) -> dict[str, Any]:
    """A setting's config, where its seeds began and ended, and their curves as text, one line a seed."""
    curves = {}
    for metric in CURVES:
        if all(metric in run["records"][-1] for run in runs):
            steps, values = series(runs, metric)
            lines = [" ".join(f"{value:.4g}" for value in row) for row in values]
            curves[metric] = {"steps": " ".join(map(str, steps.tolist())), "seeds": lines}
    ends = [{key: value for key, value in run["summary"].items() if key != "objective"} for run in runs]
    return {"objective": runs[0]["summary"]["objective"], "config": runs[0]["config"], "seeds": ends, "curves": curves}


def series(runs: list[dict[str, Any]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [T] and the metric [runs, T], at the steps whose record has it in every run."""
    found = [{record["step"]: record[metric] for record in run["records"] if metric in record} for run in runs]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    return np.array(steps), np.array([[one[step] for step in steps] for one in found])


def band(axis: Any, runs: list[dict[str, Any]], metric: str, label: str, colour: str, window: int = 1) -> None:
    """The mean over the seeds, and the band from the smallest to the largest; ``window`` smooths each run."""
    steps, values = series(runs, metric)
    if window > 1 and len(steps) >= window:
        kernel = np.ones(window) / window
        values = np.stack([np.convolve(row, kernel, mode="valid") for row in values])
        steps = steps[window - 1 :]
    axis.plot(steps, values.mean(0), color=colour, label=label)
    axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def save(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def right(completion: str, row: Mapping[str, Any]) -> float:
    """1 for the right sum."""
    return exact_match(completion, row)
