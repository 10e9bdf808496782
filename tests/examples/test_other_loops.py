"""Examples of every other kind: two steps of each on a tiny model."""

from types import SimpleNamespace

import pytest

import rl_fn
from examples import conversations, own_loss, own_model, ppo, preference, reward_model, sft
from rl_bridge.environments import functions
from rl_bridge.models.pretrained import load_pretrained
from rl_bridge.models.small import character_tokenizer
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


@pytest.mark.parametrize(("steps", "warmup"), [(10, 10), (3, 10), (1, 1)])
def test_ppo_without_a_step_of_the_policy(problems, steps, warmup):
    with pytest.raises(ValueError, match=f"^--steps {steps} with --critic-warmup {warmup}: the policy would never"):
        ppo.main("no model", str(problems), steps=steps, critic_warmup=warmup)


def test_ppo(records, problems, monkeypatch):
    monkeypatch.setattr(ppo, "reward", lambda completion, row: len(completion))
    sizes = {"prompts": 8, "max_new_tokens": 4, "updates": 2, "lr": 0.02, "critic_lr": 0.05, "critic_warmup": 1}
    first, second = records(ppo, problems, **sizes)
    assert "policy_loss" not in first and second["value_loss"] != first["value_loss"] and "policy_loss" in second


def test_own_loss(records, problems, tmp_path, monkeypatch):
    monkeypatch.setattr(own_loss, "reward", lambda completion, row: completion.count("1"))
    sizes = {"prompts": 4, "n": 4, "max_new_tokens": 5, "reference_every": 1, "lr": 0.02}
    first, second = records(own_loss, problems, **sizes)
    assert first["policy_loss"] != second["policy_loss"] and second["kl"] == first["kl"] == 0  # the reference follows
    (tmp_path / "run").rename(tmp_path / "own")
    monkeypatch.setattr(own_loss, "loss", rl_fn.components.PPOClip(0.2, 0.28))
    for own, expected in zip((first, second), records(own_loss, problems, **sizes), strict=True):
        assert own["policy_loss"] == pytest.approx(expected["policy_loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_own_model(ended, problems, tmp_path):
    character_tokenizer("0123456789+-=").save_pretrained(tmp_path / "words")
    ended(own_model, tmp_path / "words", problems, output=tmp_path, steps=2)
    first, second = (record for record in metrics(tmp_path / "own_model") if "stage" in record)
    assert first["policy_loss"] != second["policy_loss"]
    folder = tmp_path / "own_model" / "model"
    ended(own_model, folder, problems, weights=folder, output=tmp_path / "again", steps=1)
    assert {file.name for file in folder.iterdir()} >= {"model.safetensors", "own_model.json", "tokenizer.json"}


def test_conversations(records, problems, monkeypatch):
    calls = [("multiply", {"a": 3, "b": 4})]
    monkeypatch.setattr(functions, "call_form", lambda *_: SimpleNamespace(calls=lambda text: calls))
    monkeypatch.setattr(conversations, "reward", lambda completion, row: completion.count("1"))
    sizes = {"prompts": 4, "n": 4, "max_new_tokens": 5, "max_turns": 3, "lr": 0.02}
    first, second = records(conversations, problems, **sizes)
    assert 1 < first["turns"] <= 3 and first["policy_loss"] != second["policy_loss"]
