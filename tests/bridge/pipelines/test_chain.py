"""Demonstrations, reward model, PPO with a critic: three commands, each of which reads the folder of the one before."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_tools.cli import main
from tests.support.results import metrics

SUMS = [(a, b) for a in range(10, 20) for b in range(10, 16)]


def run(folder, trainer, *words, **options):
    shared = {"output": folder, "held-out": 8, "threads": 1, "optimizer.learning-rate": 0.01, "optimizer.warmup": 0}
    given = [str(word) for name, value in (shared | options).items() for word in (f"--{name}", value)]
    assert main(["train", trainer, *words, *given]) == 0


def chain(folder, start):
    """The three runs in ``folder``: demonstrated, judged, improved."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"] + "0"} for row in rows]
    for name, lines in {"rows": rows, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, judge = folder / "demonstrated" / "model", folder / "judged" / "model"
    data = {"data": folder / "rows.jsonl"}
    run(folder, "sft", name="demonstrated", model=start, **data, **{"steps": 2, "rows-per-step": 8})
    compared = {"data": folder / "pairs.jsonl", "steps": 3, "rows-per-step": 8}
    run(folder, "reward-model", name="judged", model=model, **compared)
    options = {"sft.steps": 0, "policy.steps": 2, "policy.prompts-per-step": 4, "policy.sampling.n": 2}
    options |= {"critic.model": judge, "objective.kl.place": "reward", "objective.kl.coef": 1.0}
    rewards = ["--reward", f"learned=model:{judge}", "right=exact", "--reward-weights", "1", "0"]
    options |= {"policy.sampling.max-new-tokens": 5, "policy.reference-every": 2}  # a reference that follows is saved
    run(folder, "policy", "objective:ppo", *rewards, name="improved", model=model, **data, **options)


@pytest.mark.long
def test_each_command_reads_the_folder_of_the_one_before(tmp_path, model_folder):
    chain(tmp_path, model_folder)
    exported, judge = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("demonstrated", "judged")
    )
    assert any((judge[name] != exported[name]).any() for name in judge.keys() & exported.keys())
    # The reference is the fine-tuned model, and the critic began as the reward model, whose values are not 0.
    checkpoint = max((tmp_path / "improved" / "checkpoints").iterdir())
    reference = load_file(checkpoint / "reference" / "rank-00000.safetensors")
    assert exported and all(any(torch.equal(exported[name], x) for x in reference.values()) for name in exported)
    first, last = metrics(tmp_path / "improved")
    assert first["kl"] == 0.0 != last["kl"] and abs(first["values"]) > 1e-3
    check_learned_reward(tmp_path / "improved", tmp_path / "judged" / "model")
    results = [json.loads((tmp_path / name / "summary.json").read_text())["result"] for name in ("judged", "improved")]
    assert results[0].startswith("held-out accuracy") and results[1].startswith("held-out reward")


def check_learned_reward(folder, judge):
    """A completion has the number that transformers gives its tokens; the weight of the true reward is 0."""
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    samples = json.loads((folder / "samples.json").read_text())["before"]["sampled"]
    assert len({sample["learned"] for sample in samples}) > 4
    for sample in samples:
        tokens = [*tokenizer(sample["prompt"] + sample["completion"]).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            assert model(torch.tensor([tokens])).logits.item() == pytest.approx(sample["learned"], abs=1e-5)
    for record in metrics(folder):
        assert record["reward"] == pytest.approx(record["reward/learned"], abs=1e-6) and "reward/right" in record
