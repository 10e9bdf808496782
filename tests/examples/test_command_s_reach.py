"""A loop reaches what the command reaches: teacher, greedy baseline, controlled terms, kept completions; to the bit."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import rl_fn
from rl_bridge import (
    AdamW,
    Policy,
    Reference,
    Rollout,
    Run,
    SamplingParams,
    Teacher,
    current_executor,
    load_model,
    load_rows,
)
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_tools.cli import main
from tests.support.results import metrics

pytestmark = pytest.mark.long

REWARD = """import zlib

def unlike(completion, row):
    return zlib.crc32(completion.encode()) % 997 / 997

def alike(completion, row):
    return unlike(completion, row) if zlib.crc32(row["prompt"].encode()) % 2 else 0.5
"""
RECIPES, KL, ENTROPY = rl_fn.recipes, rl_fn.components.KL, rl_fn.components.EntropyBonus
GRPO = ["objective:grpo", "--objective.kl.coef", "0.02"]
LINEAR = ["--kl-control.kind", "linear", "--kl-control.target", "0.001", "--kl-control.horizon", "64"]
ADAPTIVE = ["--entropy-control.kind", "adaptive", "--entropy-control.target", "9.0", "--entropy-control.step", "0.01"]


def linear(coef):
    return rl_fn.linear_kl(0.001, coef, horizon=64, samples=16)


@dataclass(frozen=True)
class Variant:
    """The words of a command and the objects of a loop that are the same."""

    words: list[str]
    objective: rl_fn.Objective
    control: Mapping[str, rl_fn.Controller] = field(default_factory=dict)
    moves: str | None = None
    """The coefficient that the controller changes."""
    rescored: bool = False
    updates: int = 1
    """With several, half of the prompts have one reward."""


VARIANTS = {
    "teacher": Variant(["objective:on-policy-distillation"], RECIPES.on_policy_distillation()),
    "greedy baseline": Variant(["objective:remax"], RECIPES.remax()),
    "controlled KL": Variant(
        [*GRPO, *LINEAR],
        RECIPES.grpo().replace(kl=KL("k3", 0.02)),
        {"kl": linear(0.02)},
        "kl_coef",
    ),
    "controlled KL in the reward": Variant(
        [*GRPO, "--objective.kl.place", "reward", "--objective.kl.estimator", "k1", *LINEAR],
        RECIPES.grpo().replace(kl=None, reward_kl=KL("k1", 0.02)),
        {"reward_kl": linear(0.02)},
        "reward_kl_coef",
    ),
    "controlled entropy": Variant(
        ["objective:dapo", *ADAPTIVE],
        RECIPES.dapo().replace(entropy=ENTROPY(0.0)),
        {"entropy": rl_fn.adaptive_entropy(9.0, step=0.01)},
        "entropy_coef",
    ),
    "log-probabilities of its own": Variant(
        ["objective:dapo", "--policy.recompute-old-logprobs"], RECIPES.dapo(), rescored=True
    ),
    "several updates": Variant(GRPO, RECIPES.grpo().replace(kl=KL("k3", 0.02)), updates=2),
    "several updates, rows without a gradient": Variant(
        ["objective:dapo", "--policy.recompute-old-logprobs"], RECIPES.dapo(), rescored=True, updates=2
    ),
}


def unlike(completion, row):
    """A reward that differs in each group: all rows have a gradient, and go through the same micro-batches."""
    return zlib.crc32(completion.encode()) % 997 / 997


def alike(completion, row):
    """Equal rewards in the groups of half of the prompts."""
    return unlike(completion, row) if zlib.crc32(row["prompt"].encode()) % 2 else 0.5


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A larger model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("teacher") / "tiny"
    tokenizer = character_tokenizer("0123456789+-=")
    save_pretrained(folder, tiny_qwen2(tokenizer, hidden=32, layers=1, heads=2, seed=2), tokenizer)
    return folder


@pytest.fixture
def loop(model_folder, problems, teacher_folder, tmp_path):
    """Run the loop of a variant in this process; its records."""

    def run(name, variant, *, resume=False, stop_at=None):
        current_executor().stop()
        source, rows = load_model(str(model_folder)), load_rows(str(problems))
        objective = variant.objective
        fields = (*objective.required_rollout_fields, *objective.required_batch_fields)
        rollout = Rollout(source)
        optimizer = AdamW(0.02, warmup=0, total=3 * variant.updates, beta2=0.99)
        policy = Policy(source, objective, optimizer, control=variant.control)
        beside = [Reference(source)] if "ref_logprobs" in fields else []
        beside += [Teacher(load_model(str(teacher_folder)), source)] if "teacher_logprobs" in fields else []
        try:
            with Run(
                name, [policy, rows], output=tmp_path, resume=resume, checkpoint_every=1, samples_every=2
            ) as steps:
                for step in steps.steps(3):
                    policy.sync_weights(rollout)
                    if step == stop_at:
                        raise KeyboardInterrupt
                    prompts, sampling = rows.take(4), SamplingParams(n=4, max_new_tokens=5, seed=step)
                    greedy = None
                    if "greedy_rewards" in fields:
                        greedy = rollout.generate(prompts, SamplingParams(max_new_tokens=5, temperature=0.0))
                    reward = alike if variant.updates > 1 else unlike
                    groups = rollout.generate(prompts, sampling).score(reward, greedy=greedy)
                    batch, several = groups.batch(), {"updates": variant.updates}
                    if variant.updates > 1:  # what is scored behind the advantages is what the update reads
                        batch = batch.with_advantages(objective, coefficients=policy.coefficients)
                        batch = policy.score(batch, **several) if variant.rescored else batch
                        for model in beside:
                            batch = model.score(batch, **several)
                    else:
                        batch = policy.score(batch) if variant.rescored else batch
                        for model in beside:
                            batch = model.score(batch)
                        batch = batch.with_advantages(objective, coefficients=policy.coefficients)
                    steps.log(policy.update(batch, **several), groups)
                policy.save(steps.folder / "model")
        finally:
            current_executor().stop()
        return metrics(tmp_path / name)

    return run


def lines(folder):
    """Kept completions without what a command and a loop name in their own ways."""
    records = [json.loads(line) for line in (folder / "completions.jsonl").read_text("utf-8").splitlines()]
    for record in records:
        for sample in record["samples"]:
            sample["rewards"] = list(sample["rewards"].values())
    return records


def only_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without an evaluation's metrics, and without a reward by its function's name."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith("held_out") and name not in ("reward/reward", "reward/unlike")
    }


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_loop_has_the_command_s_numbers_and_lines_and_goes_on_with_these(
    loop, variant, model_folder, problems, teacher_folder, tmp_path
):
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "--model": model_folder, "--data": problems, "--eval-data": problems, "--output": tmp_path, "--name": "command",
        "--reward": f"{tmp_path / 'reward.py'}:{'alike' if variant.updates > 1 else 'unlike'}",
        "--policy.steps": 3, "--policy.updates-per-step": variant.updates, "--policy.prompts-per-step": 4,
        "--policy.sampling.n": 4, "--policy.sampling.max-new-tokens": 5, "--optimizer.learning-rate": 0.02,
        "--optimizer.warmup": 0, "--optimizer.decay": "linear", "--optimizer.beta2": 0.99, "--samples-every": 2,
    }  # fmt: skip
    if "teacher_logprobs" in variant.objective.required_rollout_fields:
        settings["--teacher"] = teacher_folder
    pairs = [str(word) for pair in settings.items() for word in pair]
    first, *others = variant.words
    assert main(["train", "policy", first, "--no-track-kl", *pairs, *others]) == 0
    expected = [only_numbers(record) for record in metrics(tmp_path / "command") if "stage" in record]
    whole = [only_numbers(record) for record in loop("whole", variant)]
    assert whole == expected
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("command", "whole")]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "whole") == lines(tmp_path / "command")
    assert [record["step"] for record in lines(tmp_path / "whole")] == [0, 2]
    if variant.moves is not None:
        assert len({record[variant.moves] for record in whole}) == 3
    assert ("mismatch/alarm" in whole[0]) == variant.rescored
    assert any(record["informative"] < 1 for record in whole) == (variant.updates > 1 and variant.rescored)
    with pytest.raises(KeyboardInterrupt):
        loop("stopped", variant, stop_at=2)
    assert [only_numbers(record) for record in loop("stopped", variant, resume=True)] == whole
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")
