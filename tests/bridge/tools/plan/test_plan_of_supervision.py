"""A plan says what ``--memory`` found in a run of supervised fine-tuning, of a reward model, of preferences.

All rows have the plan's greatest length.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_tools.plan.plan_command import run as rl_fn_plan
from rl_tools.plan.steps import SUPERVISION_PHASES
from rl_tools.profile.profiler import MemoryProfiler
from rl_train.preference import PreferencePipeline, run_preference
from rl_train.reward_model import RewardModelPipeline, run_reward_model
from rl_train.sft import SFTPipeline, run_sft
from tests.bridge.tools.plan.measured_runs import peaks
from tests.bridge.tools.plan.supervised_runs import PAIRS, ROWS, TOKENS, common


def agree(folder: Path) -> None:
    """Every phase of the plan of the run's folder is within 5 % of what the run wrote down."""
    words = ["--prompt-tokens", "6", "--completion-tokens", "3", "--no-knobs", "--json", str(folder / "plan.json")]
    assert rl_fn_plan([str(folder / "run"), *words]) == 0
    planned = json.loads((folder / "plan.json").read_text())["phases"]
    measured = peaks(folder / "run" / "memory.jsonl")
    assert tuple(planned) == SUPERVISION_PHASES
    for phase in SUPERVISION_PHASES:
        assert abs(planned[phase]["bytes"] / measured[phase] - 1) <= 0.05, (phase, planned[phase], measured)


def counts(config: Any) -> Any:
    return replace(config, steps=2, rows_per_step=8, evaluate_every=1)


@pytest.mark.long
def test_the_plan_of_a_supervised_run_is_within_five_percent_of_its_memory(tmp_path):
    start = SFTPipeline(**common(tmp_path, ROWS), micro_batch_tokens=4 * TOKENS)
    run_sft(counts(start), [MemoryProfiler()])
    agree(tmp_path)


@pytest.mark.slow
def test_the_plan_of_a_reward_models_run_is_within_five_percent_of_its_memory(tmp_path):
    start = RewardModelPipeline(**common(tmp_path, PAIRS), micro_batch_tokens=4 * TOKENS)
    run_reward_model(counts(start), [MemoryProfiler()])
    agree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_the_plan_of_a_preference_run_is_within_five_percent_of_its_memory(tmp_path, cached: bool):
    start = PreferencePipeline(**common(tmp_path, PAIRS), micro_batch_tokens=4 * TOKENS, cache_reference=cached)
    run_preference(counts(start), [MemoryProfiler()])
    agree(tmp_path)
