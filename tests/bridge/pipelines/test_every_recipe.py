"""Every recipe of rl_fn trains: two steps of the command's own pipeline, all in this process."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rl_fn
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.loop.data import Model
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import ControlOptions, objective_options
from rl_train.policy import Models, run_policy
from rl_train.policy_inputs import PolicyInputs
from rl_train.policy_options import CriticOptions, PolicyPipeline

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]
# Of four completions there is one set of four, which has no lead over another.
CONSTANTS = {"passk": {"k": 2}}
TIMES = ("seconds", "tokens_per_second", "time", "attempt", "run")
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup=0)


def even(trajectories):
    """Even digits rather than odd ones."""
    return [sum(c in "02468" for c in t.completion) - 0.3 * len(t.completion) for t in trajectories]


def none_negative(trajectories):
    """Even digits, counted: MaxRL refuses negative rewards."""
    return [float(sum(c in "02468" for c in t.completion)) for t in trajectories]


def even_and_short(trajectories):
    return {"even": even(trajectories), "short": [float(len(t.completion) < 3) for t in trajectories]}


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory):
    """The model that every recipe starts from, and a teacher of the same vocabulary in a folder."""
    model = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2, seed=1)
    teacher = tmp_path_factory.mktemp("teacher") / "model"
    save_pretrained(teacher, tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=2), tokenizer)
    return model, str(teacher)


def pipeline_of(recipe, folder, teacher, **options):
    policy = {"steps": 2, "prompts_per_step": 3, "updates_per_step": 2}
    policy |= {"correct_reward": 0.5} if recipe == "vapo" else {}  # the others do not read what is correct
    policy |= {"recompute_old_logprobs": True} if recipe == "decoupled_ppo" else {}
    sampling = SamplingParams(n=4, max_new_tokens=4)
    policy = PolicyConfig(**policy | {"sampling": sampling} | options.pop("policy", {}))
    needs_teacher = recipe == "on_policy_distillation"
    return PolicyPipeline(
        name=recipe,
        output=folder,
        policy=policy,
        optimizer=OPTIMIZER,
        critic=CriticOptions(optimizer=OPTIMIZER) if recipe in ("ppo", "vapo") else CriticOptions(),
        objective=options.pop("objective", None) or objective_options(recipe, **CONSTANTS.get(recipe, {})),
        teacher=teacher if needs_teacher else None,
        checkpoint_every=options.pop("checkpoint_every", 100),
        **options,
    )


def run(pipeline, start, tokenizer, rewards=even):
    model = Model(StateSource(start[0]), tokenizer)
    run_policy(pipeline, read=lambda options: PolicyInputs.of(options, model, ROWS[:6], ROWS[6:], rewards))
    folder = pipeline.output / pipeline.name
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


QUICK = ("dapo", "ppo", "gdpo", "remax")
"""Without more; with a critic; with several rewards; with greedy completions."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in rl_fn.recipes.__all__]
)
def test_every_recipe_trains(recipe, start, tokenizer, tmp_path):
    rewards = {"gdpo": even_and_short, "maxrl": none_negative}.get(recipe, even)
    records = run(pipeline_of(recipe, tmp_path, start[1]), start, tokenizer, rewards)
    assert [(record["stage"], record["step"]) for record in records] == [("policy", 0), ("policy", 1)]
    numbers = [value for record in records for value in record.values() if isinstance(value, int | float)]
    assert len(numbers) > 20 and all(math.isfinite(value) for value in numbers)
    after = load_file(tmp_path / recipe / "model" / "model.safetensors")
    before = start[0].state_dict()
    assert sum(not torch.equal(value, before[name]) for name, value in after.items()) > len(after) / 2


CONTROLLED = {
    "ppo": ({"kl_control": ControlOptions(kind="pid", target=0.01)}, even),
    "gdpo": ({"entropy_control": ControlOptions(kind="constraint", target=3.0, lr=0.1)}, even_and_short),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CONTROLLED)
def test_critic_controllers_and_archive_go_on_from_a_checkpoint(recipe, start, tokenizer, tmp_path, monkeypatch):
    options, reward = CONTROLLED[recipe]
    options = options | {"policy": {"steps": 4, "evaluate_every": 1}, "checkpoint_every": 1}

    def made(folder, resume=False):
        pipeline = pipeline_of(recipe, folder, start[1], **{**options, "policy": dict(options["policy"])})
        records = run(replace(pipeline, resume=resume), start, tokenizer, reward)
        measured = [{k: v for k, v in r.items() if k not in TIMES} for r in records]
        return measured, load_file(folder / recipe / "model" / "model.safetensors")

    whole, weights = made(tmp_path / "whole")
    coefficients = [value for record in whole for name, value in record.items() if name in ("kl_coef", "entropy_coef")]
    assert len(set(coefficients)) > 2
    with monkeypatch.context() as patch:
        update, steps = Models.update, []

        def dying(models, batch, config, **options):
            if len(steps) == 2:
                raise RuntimeError("power cut")
            steps.append(batch)
            return update(models, batch, config, **options)

        patch.setattr(Models, "update", dying)
        with pytest.raises(RuntimeError, match="power cut"):
            made(tmp_path / "killed")
    again, resumed = made(tmp_path / "killed", resume=True)
    assert again == whole and all(torch.equal(value, resumed[name]) for name, value in weights.items())
    archives = [folder / recipe / "pareto.json" for folder in (tmp_path / "whole", tmp_path / "killed")]
    if recipe == "gdpo":
        assert archives[0].read_text() == archives[1].read_text() and len(json.loads(archives[0].read_text())["front"])
