"""Examples of every other kind: two steps of each on a tiny model."""

import pytest

from examples import ppo, preference, reward_model, sft
from rl_bridge.models.pretrained import load_pretrained
from tests.support.results import metrics


def ended(example, model_folder, data, folder, **sizes):
    """The records of two steps."""
    example.main(str(model_folder), str(data), name="run", output=folder, steps=2, **sizes)
    return metrics(folder / "run")


def test_sft(model_folder, problems, tmp_path):
    first, second = ended(sft, model_folder, problems, tmp_path, rows_per_step=16, lr=0.05)
    assert second["nll"] < first["nll"] and first["stage"] == "sft"
    assert load_pretrained(str(tmp_path / "run" / "model"))


def test_preference(model_folder, pairs, tmp_path):
    first, second = ended(preference, model_folder, pairs, tmp_path, pairs_per_step=16, lr=0.05)
    assert first["loss"] == pytest.approx(0.6931472) and second["loss"] < first["loss"]


def test_reward_model(model_folder, pairs, tmp_path):
    first, second = ended(reward_model, model_folder, pairs, tmp_path, pairs_per_step=16, lr=0.05)
    assert first["loss"] == pytest.approx(0.6931472) and second["loss"] < first["loss"]


def test_ppo(model_folder, problems, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "reward", lambda completion, row: len(completion))
    sizes = {"prompts": 8, "max_new_tokens": 4, "updates": 2, "lr": 0.02, "critic_lr": 0.05, "critic_warmup": 1}
    first, second = ended(ppo, model_folder, problems, tmp_path, **sizes)
    assert "policy_loss" not in first and second["value_loss"] != first["value_loss"] and "policy_loss" in second
