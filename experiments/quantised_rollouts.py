"""Int8 rollouts on one task: float32 rollouts, int8 without correction, with TIS, with masking (IcePop).

python experiments/quantised_rollouts.py --workers 4    # writes experiments/results/quantised_rollouts/
python experiments/quantised_rollouts.py --backend vllm    # the same in engines of vLLM (make install-vllm)
python experiments/quantised_rollouts.py --backend vllm --outliers    # a model that int8 cannot hold well

Runs that are there already are not made again. All settings have the same task, warm start and learning rate, and all
compute π_old in the trainer. The mismatch is of the tokens of each update. The bias of the gradient is enumerated by
experiments/quantised_budget.py.
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.outliers import OutlierSource
from experiments.policy_runs import band, experiment, right, save
from rl_bridge.models.small import TinySource
from rl_bridge.pipelines.objective_options import CorrectionOptions, objective_options
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.vllm import VLLMOptions

CORRECTIONS = {
    "int8, no correction": CorrectionOptions(),
    "int8, TIS": CorrectionOptions(kind="tis", cap=2.0),
    "int8, masking": CorrectionOptions(kind="icepop", low=0.5, high=5.0),
}
METRICS = {"held_out": 1, "mismatch/k3": 5, "mismatch/effective_sample_share": 5, "corrected/changed_share": 5}


def rollout(backend: str, precision: Any) -> RolloutOptions:
    """The engine of one setting."""
    if backend == "vllm":
        options = VLLMOptions(precision=precision, dtype="float32", max_model_len=64, kv_cache_gib=0.1)
        return RolloutOptions(backend="vllm", vllm=options)
    return RolloutOptions(precision=precision)


def settings(backend: str, source: type[TinySource] = TinySource) -> dict[str, Any]:
    """Name → (options of the pipeline, reward)."""
    # vLLM's attention on a CPU takes heads of 32 and multiples of it.
    common = {"policy": {"recompute_old_logprobs": True}, "heads": 2, "source": source}
    objectives = {name: objective_options("dapo", correction=term) for name, term in CORRECTIONS.items()}
    found = {"fp32": common | {"objective": objective_options("dapo"), "rollout": rollout(backend, "fp32")}}
    found |= {n: common | {"objective": o, "rollout": rollout(backend, "int8")} for n, o in objectives.items()}
    return {name: (options, right) for name, options in found.items()}


def draw(runs: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Held-out accuracy, mismatch and effective sample by step: mean of the seeds, band from least to most."""
    figure = Figure(figsize=(18, 4.5), layout="constrained")
    for axis, (metric, window) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for i, (name, of) in enumerate(runs.items()):
            if all(metric in run["records"][-1] for run in of):
                band(axis, of, metric, name, f"C{i}", window)
        axis.set(xlabel="step", title=metric.replace("_", "-"))
        axis.grid(alpha=0.3)
    figure.axes[1].set_yscale("symlog", linthresh=1e-7)
    figure.axes[0].legend(fontsize=7)
    save(figure, folder / "quantised_rollouts.png")


if __name__ == "__main__":
    backend = "in_process"
    if "--backend" in sys.argv:
        place = sys.argv.index("--backend")
        _, backend = sys.argv[place : place + 2]
        del sys.argv[place : place + 2]
    source: type[TinySource] = TinySource
    name = "quantised_rollouts" if backend == "in_process" else f"quantised_rollouts_{backend}"
    if "--outliers" in sys.argv:
        sys.argv.remove("--outliers")
        source, name = OutlierSource, f"{name}_outliers"
    experiment(name, settings(backend, source), draw, __doc__)
