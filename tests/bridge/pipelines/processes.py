"""``rl-fn train policy`` in processes of its own, and what two of its runs have to have in common."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.results import metrics

ROOT = Path(__file__).parents[3]
# Rewards that depend on the tokens alone and differ within a group.
REWARD = "def even_digits(completion, row):\n    return sum(c in '02468' for c in completion) + 0.1 * len(completion)\n"
SHORT = {
    "--sft.steps": 2,
    "--policy.steps": 3,
    "--policy.updates-per-step": 1,
    "--held-out": 8,
    "--optimizer.warmup": 0,
}
SHORT |= {"--policy.evaluate-every": 2, "--optimizer.learning-rate": 0.01, "--policy.sampling.temperature": 0.7}


def in_a_process(words, *, ranks=1, timeout=150):
    """Run the command with these words, as a user does."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"] if ranks > 1 else []
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *launch, "-m", "rl_tools.cli", "train", "policy", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def assert_same_run(folder, wanted):
    """Metrics to rounding, every sample and the trained weights."""
    found, expected = metrics(folder), metrics(wanted)
    assert len(found) == len(expected) == 5
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert {k: a[k] for k in ("stage", "step")} == {k: b[k] for k in ("stage", "step")}
        numbers = [key for key in a if key not in ("stage", "step")]
        assert [a[key] for key in numbers] == pytest.approx([b[key] for key in numbers], rel=1e-3, abs=1e-5), a["step"]
    assert found[-1]["kl"] > 1e-4 and found[2]["kl"] == 0.0
    samples = [json.loads((path / "samples.json").read_text()) for path in (folder, wanted)]
    said = [[sample["completion"] for sample in run["after"]["sampled"]] for run in samples]
    assert said[0] == said[1]
    weights = [load_file(path / "model" / "model.safetensors") for path in (folder, wanted)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-3, atol=1e-4)
