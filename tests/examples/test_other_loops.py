"""Examples of every other kind: two steps of each on a tiny model."""

import pytest

from examples import ppo, preference, reward_model, sft
from rl_bridge.models.pretrained import load_pretrained
from tests.support.results import metrics


@pytest.fixture
def records(ended, model_folder, tmp_path):
    """Run two steps of an example; their records."""

    def run(example, data, **sizes):
        ended(example, model_folder, data, name="run", output=tmp_path, steps=2, **sizes)
        return metrics(tmp_path / "run")

    return run


def test_sft(records, problems, tmp_path):
    first, second = records(sft, problems, rows_per_step=16, lr=0.05)
    assert second["nll"] < first["nll"] and first["stage"] == "sft"
    assert load_pretrained(str(tmp_path / "run" / "model"))


def test_preference(records, pairs):
    first, second = records(preference, pairs, pairs_per_step=16, lr=0.05)
    assert first["loss"] == pytest.approx(0.6931472) and second["loss"] < first["loss"]


def test_reward_model(records, pairs):
    first, second = records(reward_model, pairs, pairs_per_step=16, lr=0.05)
    assert first["loss"] == pytest.approx(0.6931472) and second["loss"] < first["loss"]


def test_ppo(records, problems, monkeypatch):
    monkeypatch.setattr(ppo, "reward", lambda completion, row: len(completion))
    sizes = {"prompts": 8, "max_new_tokens": 4, "updates": 2, "lr": 0.02, "critic_lr": 0.05, "critic_warmup": 1}
    first, second = records(ppo, problems, **sizes)
    assert "policy_loss" not in first and second["value_loss"] != first["value_loss"] and "policy_loss" in second
