"""A loop that trains adapters, or a part of the model: the command's numbers to the bit, stopped and resumed too."""

import pytest
import torch

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    LoRAOptions,
    Policy,
    Reference,
    Rollout,
    Run,
    SamplingParams,
    current_executor,
    load_model,
    load_rows,
)
from rl_bridge.models.pretrained import load_pretrained
from rl_tools.cli import main
from tests.support.results import metrics

pytestmark = pytest.mark.long

LENGTH = "def reward(completion, row):\n    return len(completion) + 0.1 * completion.count('1')\n"
PARTS = {
    "lora": (
        ["--lora.rank", "4", "--lora.target-modules", "q_proj", "up_proj"],
        {"lora": LoRAOptions(rank=4, target_modules=("q_proj", "up_proj"))},
    ),
    "frozen": (["--freeze", "model.embed_tokens.*", "*.mlp.*"], {"freeze": ("model.embed_tokens.*", "*.mlp.*")}),
}


def longer(completion, row):
    return len(completion) + 0.1 * completion.count("1")


@pytest.fixture
def loop(model_folder, problems, tmp_path):
    """Run the loop in this process; its records."""

    def run(name, *, resume=False, stop_at=None, **part):
        current_executor().stop()
        source, rows = load_model(str(model_folder)), load_rows(str(problems))
        objective = rl_fn.recipes.dapo()
        rollout, policy = Rollout(source), Policy(source, objective, AdamW(0.02, warmup=0, total=3, beta2=0.99), **part)
        try:
            with Run(name, state=[policy, rows], output=tmp_path, resume=resume, checkpoint_every=1) as run:
                for step in run.steps(3):
                    policy.sync_weights(rollout)
                    if step == stop_at:
                        raise KeyboardInterrupt
                    groups = rollout.generate(rows.take(4), SamplingParams(n=4, max_new_tokens=5, seed=step)).score(
                        longer
                    )
                    run.log(policy.update(groups.batch().with_advantages(objective)), groups)
                policy.save(run.folder / "model")
        finally:
            current_executor().stop()
        return metrics(tmp_path / name)

    return run


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("part", PARTS)
def test_a_trained_part_has_the_command_s_numbers_to_the_bit(loop, part, model_folder, problems, tmp_path):
    words, options = PARTS[part]
    (tmp_path / "reward.py").write_text(LENGTH)
    settings = {
        "--model": model_folder, "--data": problems, "--eval-data": problems, "--output": tmp_path, "--name": "command",
        "--reward": f"{tmp_path / 'reward.py'}:reward", "--policy.steps": 3, "--policy.prompts-per-step": 4,
        "--policy.sampling.n": 4, "--policy.sampling.max-new-tokens": 5, "--optimizer.learning-rate": 0.02,
        "--optimizer.warmup": 0, "--optimizer.decay": "linear", "--optimizer.beta2": 0.99, "--samples-every": 0,
    }  # fmt: skip
    pairs = [str(word) for pair in settings.items() for word in pair]
    assert main(["train", "policy", "--no-track-kl", *pairs, *words]) == 0
    expected = [
        {name: value for name, value in record.items() if not name.startswith("held_out")}
        for record in metrics(tmp_path / "command")
        if "stage" in record
    ]
    assert loop("whole", **options) == expected
    assert weights(tmp_path / "whole") == weights(tmp_path / "command")
    with pytest.raises(KeyboardInterrupt):
        loop("stopped", stop_at=2, **options)
    assert loop("stopped", resume=True, **options) == expected
    before, after = (
        load_pretrained(str(folder))[0].state_dict() for folder in (model_folder, tmp_path / "whole" / "model")
    )
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    own = ("q_proj.weight", "up_proj.weight") if part == "lora" else ("_proj.weight", "_proj.bias", "norm.weight")
    assert trained and all(name.endswith(own) and not (part == "frozen" and ".mlp." in name) for name in trained)


def test_adapters_go_from_a_warm_start_to_the_policy_and_merged_to_a_reference(model_folder, problems):
    current_executor().stop()
    source, lora = load_model(str(model_folder)), LoRAOptions(rank=2)
    warm = Policy(source, NLL(), AdamW(0.05), lora=lora)
    policy, reference = Policy(source, rl_fn.recipes.dapo(), AdamW(0.02), lora=lora), Reference(source)
    warm.update([{"prompt": "1+1=", "answer": "2"}])
    for target in (policy, reference):
        warm.sync_weights(target)
    rollout = Rollout(source)
    policy.sync_weights(rollout)
    groups = rollout.generate([{"prompt": "1+1="}], SamplingParams(n=2, max_new_tokens=4)).score(longer)
    batch = reference.score(policy.score(groups.batch()))
    torch.testing.assert_close(batch.tokens.ref_logprobs, batch.tokens.old_logprobs, atol=2e-6, rtol=0)
    assert not torch.equal(batch.tokens.old_logprobs, Reference(source).score(batch).tokens.ref_logprobs)
    current_executor().stop()
