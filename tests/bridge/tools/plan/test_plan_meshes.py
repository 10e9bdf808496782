"""Plans of runs with several workers.

The slow tests compare with ``--memory`` of two ranks over gloo. The others compare a rehearsal with real tensors, both
of the first worker alone.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rl_bridge.models.small import TinySource
from rl_bridge.pipelines.placement import MeshOptions
from rl_bridge.pipelines.rollout_options import AsynchronousOptions, RolloutOptions
from rl_tools.plan.plan_command import run as rl_fn_plan
from rl_tools.plan.planning import knobs, measure, plan
from rl_tools.plan.rehearsal import Rehearsal, world_of
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import LiveBytes
from rl_train.policy_configs import quickstart
from tests.bridge.tools.plan.measured_runs import written
from tests.bridge.tools.plan.supervised_runs import PAIRS, ROWS, TOKENS, common
from tests.support import warm

ROOT = Path(__file__).parents[4]
SOURCE = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
SHORT = Workload(prompts=1, responses=2, prompt_tokens=3, new_tokens=3)
MESHES = {
    "shard": {"--mesh.shard": 2},
    "tensor": {"--mesh.tensor": 2},
    "sequence": {"--mesh.sequence": 2},
    "replicate": {"--mesh.replicate": 2, "--mesh.shard": 1},
}
OPTIONS = {
    "LoRA": {"--lora.rank": 4},
    "bfloat16, recomputed": {"--dtype": "bfloat16", "--policy.recompute-old-logprobs": "", "--activations": "full"},
    "packed, offloaded": {"--packing": "", "--offload": "always"},
}
"""Of runs over two shards."""
POLICY = {
    "--sft.steps": 0,
    "--policy.steps": 3,
    "--policy.prompts-per-step": 4,
    "--policy.sampling.n": 4,
    "--policy.sampling.max-new-tokens": 8,
    "--policy.sampling.top-k": 3,
    "--micro-batch-tokens": 28,
    "--held-out": 2,
    "--checkpoint-every": 1,
}


@pytest.fixture(autouse=True)
def no_world():
    """Models of one worker in other tests may have left a process group of one behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    assert not dist.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize(
    "axis", ["shard", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("tensor", "sequence", "replicate"))]
)
def test_plan_and_measurement_of_the_first_of_two_workers_agree(axis: str):
    start, mesh = quickstart(), MeshOptions(**{axis: 2} | ({"shard": 1} if axis == "replicate" else {}))
    pipeline = replace(start, workers=2, mesh=mesh, micro_batch_tokens=12, track_kl=False)
    pipeline = replace(pipeline, policy=replace(start.policy, updates_per_step=1))
    load = Workload(prompts=2, responses=4, prompt_tokens=3, new_tokens=3)
    planned, measured = plan(pipeline, SOURCE, load), measure(pipeline, SOURCE, load)
    for phase, peak in measured.phases.items():
        assert abs(planned.phases[phase].bytes / peak.bytes - 1) <= 0.02, (phase, planned.phases[phase], peak)
    alone = plan(replace(pipeline, workers=1, mesh=MeshOptions()), SOURCE, load, ("generation",)).phases["generation"]
    parts = planned.phases["generation"].components
    held = {name: parts[name] / alone.components[name] for name in ("kv_cache", "optimizer")}
    assert held == pytest.approx({"kv_cache": 0.5, "optimizer": 1.0 if axis == "replicate" else 0.5}, rel=0.05)


def test_a_weight_is_gathered_into_one_array_in_a_rehearsal_as_for_real():
    peaks = []
    with world_of(2):
        mesh = DeviceMesh("cpu", [0, 1])
        for live in (LiveBytes(), Rehearsal()):
            with live:
                cut = DTensor.from_local(torch.zeros(64, 8), mesh, [Shard(0)])
                cut.full_tensor()
            peaks.append(live.peak().bytes)
    assert peaks == [3 * 64 * 8 * 4] * 2  # a half, and the whole


def test_no_process_group_stays_behind_an_error():
    hook = sys.excepthook
    with pytest.raises(RuntimeError, match="broken"), world_of(2):
        raise RuntimeError("broken")
    assert not dist.is_initialized() and sys.excepthook is hook
    with world_of(2), pytest.raises(ValueError, match="in one of 2 already"):
        plan(replace(quickstart(), workers=2), SOURCE, SHORT)


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 3, "asynchronous": AsynchronousOptions(rollout_workers=1)},
        {"asynchronous": AsynchronousOptions(rollout_workers=1)},
        {"asynchronous": AsynchronousOptions(rollout_workers=1), "rollout": RolloutOptions(backend="vllm")},
        {"workers": 2, "rollout": RolloutOptions(backend="vllm")},
    ],
    ids=str,
)
def test_what_no_plan_is_of_is_refused(fields: dict):
    start = quickstart()
    start = replace(start, policy=replace(start.policy, recompute_old_logprobs=True))
    with pytest.raises(ValueError, match=r"rollout\.backend"):
        plan(replace(start, **fields), SOURCE, SHORT)


@pytest.mark.long
def test_the_command_says_what_it_is_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TinySource, "for_tokenizer", partial(TinySource.for_tokenizer, hidden=16, layers=1))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    words = ["sft", "--workers", "4", "--mesh.tensor", "2", "--no-knobs", "--json", str(tmp_path / "plan.json")]
    words += ["--data", str(tmp_path / "rows.jsonl"), "--held-out", "8"]
    assert rl_fn_plan(words) == 0
    assert "one of 4 workers, Mesh(replicate=1, shard=2, tensor=2, sequence=1)" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["mesh"]["shard"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("axis", MESHES)
def test_every_knob_of_a_mesh_can_be_planned(axis: str):
    """A head that is cut has no fused loss, cut matrices have no adapters."""
    pipeline = replace(quickstart(), workers=2, mesh=MeshOptions(**{"shard": 1, axis: 2}), micro_batch_tokens=12)
    options = {knob.option for knob in knobs(pipeline, SOURCE, SHORT, plan(pipeline, SOURCE, SHORT))}
    assert ("--fused-loss" in options) == (axis in ("shard", "replicate"))
    assert ("--lora.rank 16" in options) == (axis != "tensor") and "--no-track-kl" in options


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MESHES, *OPTIONS])
def test_the_plan_of_two_ranks_is_within_five_percent_of_their_memory(case: str, tmp_path):
    written(tmp_path)
    options = POLICY | MESHES.get(case, MESHES["shard"]) | OPTIONS.get(case, {})
    trained("policy", tmp_path, options | {"--reward": f"{tmp_path / 'reward.py'}:even_digits"})
    assert_within_five_percent(tmp_path, "--prompt-tokens", "6")


@pytest.mark.slow
def test_the_plan_of_shards_of_cut_matrices_is_within_five_percent_of_the_memory_of_four_ranks(tmp_path):
    written(tmp_path)
    options = POLICY | {"--mesh.shard": 2, "--mesh.tensor": 2, "--reward": f"{tmp_path / 'reward.py'}:even_digits"}
    trained("policy", tmp_path, options, ranks=4)
    assert_within_five_percent(tmp_path, "--prompt-tokens", "6")


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "rows"), [("sft", ROWS), ("reward-model", PAIRS), ("preference", PAIRS)])
def test_the_plan_of_supervision_over_two_ranks_is_within_five_percent_of_their_memory(trainer, rows, tmp_path):
    common(tmp_path, rows)
    counts = {f"--{trainer}.steps": 5, f"--{trainer}.rows-per-step": 8, f"--{trainer}.evaluate-every": 1}
    sizes = {"--held-out": 8, "--checkpoint-every": 1, "--micro-batch-tokens": 2 * TOKENS}
    trained(trainer, tmp_path, counts | sizes)
    assert_within_five_percent(tmp_path, "--prompt-tokens", "6", "--completion-tokens", "3")


def trained(trainer: str, folder: Path, options: dict[str, Any], *, ranks: int = 2) -> None:
    """Train with ``--memory`` in so many ranks on what the folder has."""
    places = {"--name": "run", "--output": folder, "--model": folder / "model", "--data": folder / "rows.jsonl"}
    words = [trainer, "--memory", *(str(word) for pair in (places | options).items() for word in pair if word != "")]
    done = warm.run("-m", "rl_tools.cli", "train", *words, count=ranks, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def assert_within_five_percent(folder: Path, *words: str) -> None:
    """Of the peak of each phase in every rank; how many these are the run's folder says."""
    assert rl_fn_plan([str(folder / "run"), *words, "--no-knobs", "--json", str(folder / "plan.json")]) == 0
    planned = json.loads((folder / "plan.json").read_text())["phases"]
    files = sorted((folder / "run").glob("memory*.jsonl"))
    assert len(files) == math.prod(json.loads((folder / "plan.json").read_text())["mesh"].values()) > 1
    for file in files:
        measured = of_steps(file)
        for phase, wanted in planned.items():
            found = min(measured[phase].values())
            assert abs(wanted["bytes"] / found - 1) <= 0.05, (file.name, phase, wanted, measured[phase])


def of_steps(lines: Path) -> dict[str, dict[int, int]]:
    """The peak of each phase in each step after the first, which makes the optimiser's state.

    From step to step of equal work a peak is higher by a gathered layer, or not: gloo lets go of a buffer that it has
    gathered into when its own thread comes to that. The lowest is without.
    """
    found: dict[str, dict[int, int]] = {}
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    whole = {line["step"] for line in written if "end_of_step" in line} - {0}
    for line in written:
        if "peak" in line and line["step"] in whole:
            steps = found.setdefault(line["phase"], {})
            steps[line["step"]] = max(steps.get(line["step"], 0), line["peak"])
    return found
