"""A plan says what ``--memory`` found in a run of the same options.

All rows have the plan's greatest length: prompts of six tokens, and a model that does not end its completions.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl_bridge.pipelines.objective_options import objective_options
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rewards.scoring_models import RewardModel
from rl_bridge.rollout.vllm import VLLMOptions
from rl_tools.plan.plan_command import run as rl_fn_plan
from rl_tools.plan.steps import PHASES, REWARDS
from rl_tools.profile.live_bytes import LiveBytes
from rl_tools.profile.profiler import MemoryProfiler
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart
from rl_train.policy_options import CriticOptions, PolicyPipeline
from tests.bridge.tools.plan.measured_runs import peaks, written

pytestmark = pytest.mark.long

TOKENS = 6 + 8


def run_of(folder: Path, **fields) -> PolicyPipeline:
    """The options of every run here; completions of eight tokens, several micro-batches a step."""
    start = quickstart()
    sampling = replace(start.policy.sampling, max_new_tokens=8, top_k=3)
    pipeline = replace(
        start,
        name="run",
        output=folder,
        model=str(folder / "model"),
        data=str(folder / "rows.jsonl"),
        reward=(f"{folder / 'reward.py'}:even_digits",),
        held_out=2,
        memory=True,
        checkpoint_every=1,
        sft=replace(start.sft, steps=0),
        micro_batch_tokens=4 * TOKENS,
        policy=replace(start.policy, steps=2, prompts_per_step=4, sampling=sampling),
    )
    return replace(pipeline, **fields)


def agree(pipeline: PolicyPipeline, folder: Path) -> dict[str, Any]:
    """Run, and compare every phase of the plan of the run's folder with what the run wrote down, within 5 %."""
    run_policy(pipeline, [MemoryProfiler()])
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["tokens"] for step in steps if step["stage"] == "policy"] == [8, 8]  # of each completion
    words = ["--prompt-tokens", "6", "--no-knobs", "--json", str(folder / "plan.json")]
    assert rl_fn_plan([str(folder / "run"), *words]) == 0
    planned = json.loads((folder / "plan.json").read_text())["phases"]
    measured = peaks(folder / "run" / "memory.jsonl")
    assert [phase for phase in planned if phase != REWARDS] == list(PHASES)
    for phase in PHASES:
        # What no meter of a worker sees is a component of its own.
        size = planned[phase]["bytes"] - planned[phase]["components"].get("reward", 0)
        assert abs(size / measured[phase] - 1) <= 0.05, (phase, planned[phase], measured[phase])
    return planned


def larger(folder: Path, name: str, kind: Any) -> str:
    """A model of the same vocabulary and another size, in a folder."""
    config = AutoConfig.from_pretrained(folder / "model")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_labels = 48, 96, 2, 1
    config.layer_types = ["full_attention"] * 2
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)
    return str(folder / name)


def test_the_plan_of_a_policys_run_is_within_five_percent_of_its_memory(tmp_path):
    written(tmp_path)
    agree(run_of(tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", [False, True])
def test_the_plan_of_a_run_with_a_critic_is_within_five_percent_of_its_memory(tmp_path, model: bool):
    written(tmp_path)
    critic = CriticOptions(model=larger(tmp_path, "values", AutoModelForSequenceClassification) if model else None)
    agree(run_of(tmp_path, objective=objective_options("ppo"), critic=critic), tmp_path)


@pytest.mark.slow
def test_the_plan_of_a_distillation_is_within_five_percent_of_its_memory(tmp_path):
    written(tmp_path)
    teacher = larger(tmp_path, "teacher", AutoModelForCausalLM)
    agree(run_of(tmp_path, objective=objective_options("on_policy_distillation"), teacher=teacher), tmp_path)


@pytest.mark.slow
def test_the_plan_of_a_run_with_a_reward_model_is_within_five_percent_of_what_that_takes(tmp_path, monkeypatch):
    """A reward model is in the driver's process, where no meter is; here one measures its calls, but for the first."""
    written(tmp_path)
    name = larger(tmp_path, "judge", AutoModelForSequenceClassification)
    live, score = LiveBytes(), RewardModel.__call__
    measured: list[int] = []

    def measuring(self, trajectories):
        with live:
            live.reset()
            found = score(self, trajectories)
        measured.append(live.peak().bytes)
        return found

    monkeypatch.setattr(RewardModel, "__call__", measuring)
    planned = agree(run_of(tmp_path, reward=(f"judge=model:{name}",)), tmp_path)
    parts, most = planned["checkpoint"]["components"], max(measured[1:])
    model = AutoModelForSequenceClassification.from_pretrained(name)
    assert parts["reward"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    taken = planned[REWARDS]["bytes"] - planned["checkpoint"]["bytes"] + parts["reward"]
    assert abs(taken / most - 1) <= 0.05, (planned[REWARDS], measured)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_plan_of_a_run_with_vllm_is_within_five_percent_of_its_memory(tmp_path):
    """The meter sees vLLM's tensors; neither oneDNN's packed weights nor the copies of updates, a fiftieth here."""
    written(tmp_path, hidden=64)
    vllm = VLLMOptions(kv_cache_gib=0.05, max_model_len=64, max_num_seqs=16)
    planned = agree(run_of(tmp_path, rollout=RolloutOptions(backend="vllm", vllm=vllm)), tmp_path)
    assert planned["generation"]["components"]["kv_cache"] > 0.8 * planned["generation"]["bytes"]
