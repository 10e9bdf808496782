"""Every loop: a step of which an update was skipped is counted, its batch is kept, and several in a row end the run."""

import json

import pytest
import torch
from safetensors import safe_open

import rl_fn
from rl_bridge.engines import NeedParallel
from rl_train.policy_options import WarmStart
from tests.bridge.algorithms.fake_engines import FakePolicy, longest_is_best, run_loop

STEPS = 6


class FakeEngine(FakePolicy):
    """Skips the updates of ``bad``, by their numbers."""

    def __init__(self, bad=(), loss="loss"):
        super().__init__()
        self.bad, self.loss = bad, loss

    def optimizer_step(self):
        skipped = {"skipped": 1.0} if self.updates in self.bad else {}
        return {"grad_norm": float("nan") if skipped else 1.0} | super().optimizer_step() | skipped

    def values(self, batch: NeedParallel):
        return torch.zeros(batch.data.mask.shape)


def policy_loop(output, engine, critic=None, updates=1, skips=2):
    objective = (rl_fn.recipes.ppo() if critic else rl_fn.recipes.dapo()).replace(kl=None, reward_kl=None)
    options = {"steps": STEPS, "updates_per_step": updates, "evaluate_every": STEPS}
    run_loop(longest_is_best, objective, output=output, policy=engine, critic=critic, skips=skips, **options)


def supervised_loop(output, engine):
    sft = WarmStart(steps=STEPS, rows_per_step=2)
    run_loop(longest_is_best, output=output, supervised=engine, sft=sft, skips=2)


LOOPS = {
    "policy": policy_loop,
    "several updates a step": lambda output, engine: policy_loop(output, engine, updates=2),
    "critic": lambda output, engine: policy_loop(output, FakeEngine(), critic=engine),
    "warm start": supervised_loop,
}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", LOOPS)
def test_skips_are_counted_and_kept_and_end_the_run_with_their_cause(tmp_path, name):
    folder, several = tmp_path / "policy", 2 if name == "several updates a step" else 1
    # Steps 0, 2 and 3; of several updates of a step the first one alone.
    loss = "value_loss" if name == "critic" else "loss"
    engine = FakeEngine(bad=[several * step for step in (0, 2, 3)], loss=loss)
    with pytest.raises(FloatingPointError) as stopped:
        LOOPS[name](tmp_path, engine)
    whose = "the critic" if name == "critic" else "the trained model"
    assert f"loss or gradient of {whose} was not finite in 2 steps in a row" in str(stopped.value)
    assert "stopped after step 4 of 6" in str(stopped.value)
    key = "critic_skipped" if name == "critic" else "skipped"
    assert [record.get(key) for record in records(folder)] == [1.0, None, 1.0, 1.0]
    kept = sorted((folder / "skipped").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08d}-0.safetensors" for step in (0, 2, 3)]
    with safe_open(kept[0], "pt") as file:
        assert len(file.keys()) > 2
        assert json.loads(file.metadata()["about"])["skipped"] == [whose]


def test_policy_and_critic_by_turns_are_steps_in_a_row_too(tmp_path):
    critic = FakeEngine(bad=(2, 3), loss="value_loss")
    with pytest.raises(FloatingPointError) as stopped:
        policy_loop(tmp_path, FakeEngine(bad=(1, 3)), critic=critic, skips=3)
    assert "of the critic and the trained model was not finite in 3 steps in a row" in str(stopped.value)
    assert len(records(tmp_path / "policy")) == 4
