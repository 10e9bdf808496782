"""Steps that train the critic alone, groups without a signal, and what is told of a model: once, of the right step."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

import rl_fn
from rl_bridge import (
    AdamW,
    Critic,
    Groups,
    Model,
    Policy,
    Reference,
    Rollout,
    Run,
    SamplingParams,
    current_executor,
    load_rows,
)
from rl_bridge.algorithms.policy_setup import Replaced
from rl_bridge.common.terminal import remarks
from rl_bridge.engines.engine import Engine, Turns

PPO = rl_fn.recipes.ppo()
ROWS = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
DAPO = rl_fn.recipes.dapo()


def ones(completion, row):
    return completion.count("1") - len(completion)


def drawn(rollout, prompts, seed=1, reward=ones):
    return rollout.generate(prompts, SamplingParams(n=4, max_new_tokens=3, seed=seed)).score(reward)


def test_a_step_without_an_update_keeps_completions_and_changes_no_weight(model, tmp_path):
    policy, critic, rollout = Policy(model, PPO, AdamW(1e-2)), Critic(model, PPO, AdamW(1e-2)), Rollout(model)
    rows = load_rows(ROWS)
    with policy, critic, rollout, Run("ppo", [policy, critic, rows], output=tmp_path, samples_every=1) as run:
        for step in run.steps(2):
            policy.sync_weights(rollout)
            groups = drawn(rollout, rows.take(2), step)
            batch = critic.score(groups.batch()).with_advantages(PPO)
            before = policy.engine.call("weights_version")
            update = policy.update(batch, updates=step)
            assert ("policy_loss" in update) == ("grad_norm" in update) == bool(step)
            assert (policy.engine.call("weights_version") == before) == (step == 0)
            assert update["informative"] > 0
            run.log(critic.update(batch), update, groups)
    kept = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text("utf-8").splitlines()]
    assert [record["step"] for record in kept] == [0, 1]
    # No loss has seen the tokens of the first step.
    logprobs = [[sample["tokens"]["logprob"] for sample in record["samples"]] for record in kept]
    assert all(value is None for tokens in logprobs[0] for value in tokens)
    assert any(value is not None for tokens in logprobs[1] for value in tokens)


@pytest.mark.parametrize("kept", [(0, 2), (), (0, 1, 2)])
def test_groups_without_a_signal_are_left_out(model, kept):
    def reward(completion, row):
        return ones(completion, row) if ROWS.index({"prompt": row["prompt"]}) in kept else 1.0

    with Rollout(model) as rollout:
        groups = drawn(rollout, ROWS[:3], reward=reward)
        # A group whose completions are all alike has no signal either.
        differ = [place for place, row in enumerate(groups.rewards) if row.unique().numel() > 1]
        assert set(differ) <= set(kept)
        left = groups.with_signal(DAPO)
        assert torch.equal(left.rewards, groups.rewards[differ]) and left.scored.sampled_groups == 3
        assert [t.row["prompt"] for t in left.trajectories[::4]] == [ROWS[place]["prompt"] for place in differ]
        without = DAPO.replace(dynamic_sampling=None)
        assert torch.equal(groups.with_signal(without).rewards, groups.rewards)
        more = drawn(rollout, ROWS[3:5], seed=2)
        several = Groups.joined([left, more.with_signal(DAPO)])
        assert several.scored.sampled_groups == 5


def test_two_engines_of_a_model_say_a_note_once(model, monkeypatch):
    own = Model(model.source, model.tokenizer)
    call = Engine.call

    def noting(engine, method, *arguments, **options):
        return ["rows lie padded"] if method == "notes" else call(engine, method, *arguments, **options)

    monkeypatch.setattr(Engine, "call", noting)
    remarks()
    with Reference(own):
        told = remarks()
        with Reference(own):
            pass
    with Reference(Model(model.source, model.tokenizer)):
        assert (told, remarks()) == (["rows lie padded"], ["rows lie padded"])


def test_a_rollout_that_cannot_be_made_keeps_no_slot(model, monkeypatch):
    slots = current_executor().held
    before = {slot: list(names) for slot, names in slots.items() if names}

    class Broken(Turns):
        def add(self, engine):
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        Rollout(model, turns=Broken())
    assert {slot: list(names) for slot, names in slots.items() if names} == before


def test_a_replaced_engine_is_told_with_the_step_of_the_run(model, capsys, monkeypatch):
    """A run that is resumed counts its steps from where it stopped."""
    with Policy(model, DAPO, AdamW(1e-2)) as policy, Rollout(model) as rollout:
        batch = drawn(rollout, ROWS[:2], seed=9).batch().with_advantages(DAPO)
        policy._replaced = replaced = Replaced.__new__(Replaced)
        monkeypatch.setattr(Replaced, "metrics", lambda self: {})
        monkeypatch.setattr(Replaced, "warning", lambda self, step: f"step {step}: replaced")
        log = SimpleNamespace(choose=lambda step, computed: None)
        policy.log_completions(log, 100)  # type: ignore[arg-type]
        with contextlib.suppress(ValueError):
            policy.update(batch)
        assert replaced is policy._replaced
    assert "step 100: replaced" in capsys.readouterr().out
