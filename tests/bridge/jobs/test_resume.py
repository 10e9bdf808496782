"""A run that is killed, or stopped by Ctrl-C, and resumed equals the uninterrupted one bit for bit (CPU)."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]
SETTINGS = shlex.split(
    "--sft.steps 5 --sft.rows-per-step 8 --grpo.steps 7 --grpo.prompts-per-step 6 --grpo.sampling.n 4 "
    "--grpo.minibatches 2 --grpo.evaluate-every 3 --checkpoint-every 3 --held-out 12 --threads 1 "
    "--objective.algorithm grpo --objective.kl-coef 0.01"
)


def start(folder: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "rl_bridge.cli", "train", "grpo", "--output", str(folder), "--name", "run"]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "bridge"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [*command, *SETTINGS, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    return output


def wait_for(process: subprocess.Popen, folder: Path, stage: str, step: int) -> None:
    """Until the run has logged that step: it is then in the middle of the next one, or of its checkpoint."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        path = folder / "run" / "metrics.jsonl"
        # The last line may be half there: that is what a reader of a running file must expect.
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        if any((record["stage"], record["step"]) == (stage, step) for record in records):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} of {stage} was never logged")


def equal(one: Path, other: Path) -> None:
    """Weights, optimiser, schedule, data position, random states and metrics; only times may differ."""
    weights = [load_file(folder / "run" / "model" / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    states = [torch.load(sorted((f / "run" / "checkpoints").iterdir())[-1] / "state.pt") for f in (one, other)]
    for state in states:
        for name in ("seconds", "metrics_bytes"):
            state.pop(name)
    assert_same(*states)
    metrics = [
        [json.loads(line) for line in (f / "run" / "metrics.jsonl").read_text().splitlines()] for f in (one, other)
    ]
    for records in metrics:
        for record in records:
            record.pop("seconds")
            record.pop("tokens_per_second")
    assert metrics[0] == metrics[1]


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = finish(start(folder))
    assert output.splitlines()[-1].startswith("held-out accuracy ")
    return folder


@pytest.mark.parametrize(("stage", "step"), [("sft", 3), ("grpo", 4)])
def test_killed_in_the_middle_of_a_step_then_resumed(uninterrupted, tmp_path, stage, step):
    process = start(tmp_path)
    wait_for(process, tmp_path, stage, step)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run" / "summary.json").exists()
    finish(start(tmp_path, "--resume"))
    equal(uninterrupted, tmp_path)


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(uninterrupted, tmp_path):
    process = start(tmp_path)
    wait_for(process, tmp_path, "grpo", 0)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 130, errors[-3000:]
    assert "--resume" in output.splitlines()[-1]
    finish(start(tmp_path, "--resume"))
    equal(uninterrupted, tmp_path)
