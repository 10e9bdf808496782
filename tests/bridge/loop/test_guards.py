"""Faults of a loop are refused by name: objects in no checkpoint, older weights, a seed twice, two objectives."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Ahead,
    Critic,
    Groups,
    Model,
    Policy,
    Reference,
    RewardModel,
    Rollout,
    Rows,
    Run,
    SamplingParams,
    ScoringConfig,
    load_model,
    load_rows,
    preference_loss,
)
from rl_bridge.models.small import TinySource, character_tokenizer
from tests.support.results import metrics

GRPO = rl_fn.recipes.grpo().replace(kl=None)
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)


def reward(completion, row):
    return completion.count("1") - len(completion)


@pytest.fixture
def rollout(model):
    rollout = Rollout(model)
    yield rollout
    rollout.release()


@pytest.fixture
def policy(model):
    policy = Policy(model, GRPO, AdamW(1e-3))
    yield policy
    policy.release()


def drawn(rollout, seed):
    return rollout.generate(PROMPTS[:2], replace(SAMPLING, seed=seed)).score(reward)


def batch_of(rollout, seed, objective=GRPO):
    return drawn(rollout, seed).batch().with_advantages(objective)


def test_completions_are_of_the_policy_s_weights_when_they_were_drawn(policy, rollout):
    policy.sync_weights(rollout)
    first = batch_of(rollout, 1)
    for _ in range(2):  # two epochs on a batch of the policy's
        policy.update(first)
    for batch in (batch_of(rollout, 2), policy.score(batch_of(rollout, 3))):
        with pytest.raises(
            ValueError, match=r"drawn by weights of version 0, when the policy had version 2: policy\.sync"
        ):
            policy.update(batch)
        policy.update(batch, stale=True)
    policy.sync_weights(rollout)
    policy.update(batch_of(rollout, 4))


def test_completions_are_of_the_policy_that_is_updated_whatever_its_version(model, policy, rollout):
    """Two policies in lockstep have the same versions, and other weights."""
    other = Policy(model, GRPO, AdamW(1e-1))
    other.sync_weights(rollout)
    policy.update(batch_of(rollout, 1))  # both are the model's still
    policy.sync_weights(rollout)
    other.update(batch_of(rollout, 2), stale=True)
    other.sync_weights(rollout)
    foreign = batch_of(rollout, 3)
    with pytest.raises(ValueError, match=r"by the weights of another policy: policy\.sync_weights\(rollout\) comes"):
        policy.update(foreign)
    other.update(foreign)
    policy.update(foreign, stale=True)
    warm = Policy(model, NLL(), AdamW(1e-3))
    for _ in range(3):
        warm.update(PROMPTS[:2])
    for target in (policy, rollout):
        warm.sync_weights(target)
    policy.update(batch_of(rollout, 4))  # the weights of both came from one
    for target in (other, warm):
        target.release()


PPO = rl_fn.recipes.ppo()
DPO, BT = preference_loss("dpo"), preference_loss("bradley_terry")
PAIRS = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "0"} for number in range(4)]


def pairs_of(model, loss):
    return load_rows(PAIRS, model, loss)


MEET = {
    "reference.score": ("Reference has", lambda own, other: Reference(own).score(batch_of(Rollout(other), 1))),
    "critic.score": ("Critic has", lambda own, other: Critic(own, PPO, AdamW(1e-3)).score(batch_of(Rollout(other), 1))),
    "policy.score": (
        "Policy has",
        lambda own, other: Policy(own, GRPO, AdamW(1e-3)).score(batch_of(Rollout(other), 1)),
    ),
    "policy.update": (
        "Policy has",
        lambda own, other: Policy(own, GRPO, AdamW(1e-3)).update(batch_of(Rollout(other), 1)),
    ),
    "critic.update": (
        "Critic has",
        lambda own, other: Critic(own, PPO, AdamW(1e-3)).update(
            Critic(other, PPO, AdamW(1e-3)).score(drawn(Rollout(other), 1).batch()).with_advantages(PPO)
        ),
    ),
    "sync to a rollout": (
        "than the rollout",
        lambda own, other: Policy(own, GRPO, AdamW(1e-3)).sync_weights(Rollout(other)),
    ),
    "sync to a reference": (
        "than the reference",
        lambda own, other: Policy(own, GRPO, AdamW(1e-3)).sync_weights(Reference(other)),
    ),
    "sync to a policy": (
        "than the policy",
        lambda own, other: Policy(own, NLL(), AdamW(1e-3)).sync_weights(Policy(other, GRPO, AdamW(1e-3))),
    ),
    "rows to imitate": (
        "Policy has",
        lambda own, other: Policy(own, NLL(), AdamW(1e-3)).update(load_rows(PROMPTS, other, NLL()).batch(2)),
    ),
    "held-out rows": (
        "Policy has",
        lambda own, other: Policy(own, NLL(), AdamW(1e-3)).held_out(load_rows(PROMPTS, other, NLL()).all()),
    ),
    "reference.cache": ("Reference has", lambda own, other: Reference(own).cache(pairs_of(other, DPO))),
    "reference.score of pairs": (
        "Reference has",
        lambda own, other: Reference(own).score(pairs_of(other, DPO).batch(2)),
    ),
    "pairs": (
        "Policy has",
        lambda own, other: Policy(own, DPO, AdamW(1e-3)).update(
            pairs_of(other, DPO).batch(2)._replace(ref_logprobs=torch.zeros(2, 2))
        ),
    ),
    "held-out pairs": (
        "Policy has",
        lambda own, other: Policy(own, DPO, AdamW(1e-3)).held_out(
            pairs_of(other, DPO).all()._replace(ref_logprobs=torch.zeros(4, 2))
        ),
    ),
    "pairs of a reward model": (
        "RewardModel has",
        lambda own, other: RewardModel(own, BT, AdamW(1e-3)).update(pairs_of(other, BT).batch(2)),
    ),
    "held-out pairs of a reward model": (
        "RewardModel has",
        lambda own, other: RewardModel(own, BT, AdamW(1e-3)).held_out(pairs_of(other, BT).all()),
    ),
    "joined groups": ("first", lambda own, other: Groups.joined([drawn(Rollout(own), 1), drawn(Rollout(other), 2)])),
}
"""Where completions, rows or weights of one model meet another model."""


@pytest.mark.parametrize("name", MEET)
def test_an_id_is_the_same_token_in_all_models_that_meet(name, model):
    words, meet = MEET[name]
    tokenizer = character_tokenizer("+0123456789=")
    other = Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    with pytest.raises(ValueError, match=words) as error:
        meet(model, other)
    assert "another vocabulary" in str(error.value)
    same = character_tokenizer("0123456789+=")
    meet(model, Model(model.source, same))


GONE = {
    "policy.score": lambda model, batch: Policy(model, GRPO, AdamW(1e-3)).score,
    "policy.update": lambda model, batch: Policy(model, GRPO, AdamW(1e-3)).update,
    "reference.score": lambda model, batch: Reference(model).score,
    "critic.score": lambda model, batch: Critic(model, PPO, AdamW(1e-3)).score,
    "save": lambda model, batch: Policy(model, GRPO, AdamW(1e-3)).save,
    "generate": lambda model, batch: Rollout(model).generate,
}


@pytest.mark.parametrize("name", GONE)
def test_an_object_whose_block_has_ended_says_so(name, model, rollout, tmp_path):
    batch = batch_of(rollout, 1)
    call = GONE[name](model, batch)
    with call.__self__:
        pass
    arguments = {"save": (tmp_path / "model",), "generate": (PROMPTS[:1], SAMPLING)}.get(name, (batch,))
    with pytest.raises(ValueError, match=r"at the end of its with block: make a new one"):
        call(*arguments)


def test_a_seed_draws_once(policy, rollout):
    policy.sync_weights(rollout)
    policy.update(batch_of(rollout, 1))
    policy.sync_weights(rollout)
    with pytest.raises(ValueError, match=r"an earlier step were drawn by the seed 1, too.*SamplingParams\(seed=step\)"):
        policy.update(batch_of(rollout, 1))
    policy.update(batch_of(rollout, 2))
    with pytest.raises(ValueError, match="2 of the joined groups have the seed 3"):
        Groups.joined([drawn(rollout, 4), drawn(rollout, 3), drawn(rollout, 3)])
    assert len(Groups.joined([drawn(rollout, 4), drawn(rollout, 3)]).rewards) == 4
    greedy = replace(SAMPLING, temperature=0.0)
    twice = [rollout.generate(PROMPTS, greedy).score(reward) for _ in range(2)]
    assert len(Groups.joined(twice).rewards) == 16


def test_advantages_are_of_the_objective_that_is_trained(policy, rollout):
    policy.sync_weights(rollout)
    with pytest.raises(ValueError, match="advantages of another objective than the one that is trained, grpo"):
        policy.update(batch_of(rollout, 1, rl_fn.recipes.dr_grpo()))
    policy.update(batch_of(rollout, 1, rl_fn.recipes.grpo().replace(kl=None)))


def test_what_samples_nothing_has_no_temperature(model):
    hot = ScoringConfig(temperature=0.7)
    for objective in (NLL(), preference_loss()):
        with pytest.raises(ValueError, match=r"the data's own distribution, which has no temperature, got 0\.7"):
            Policy(model, objective, AdamW(1e-3), scoring=hot)
    with pytest.raises(ValueError, match="has no temperature"):
        RewardModel(model, preference_loss("bradley_terry"), AdamW(1e-3), scoring=hot)


def test_all_that_changes_in_a_step_is_in_its_stage_s_state(model, policy, tmp_path):
    rows, reference, warm = Rows(PROMPTS), Reference(model), Policy(model, NLL(), AdamW(1e-3))
    changes = {
        "rows": lambda: rows.take(2),
        "reference": lambda: policy.sync_weights(reference),
        "sft": lambda: warm.update(PROMPTS[:2]),
    }
    for kind, change in changes.items():
        with Run(kind, [policy, rows, reference, warm], output=tmp_path) as run:
            for stage in ([policy],) if kind != "sft" else ([rows],):
                with pytest.raises(ValueError, match=f"a {kind} changes, and no checkpoint of these steps has it"):
                    for _ in run.steps(2, stage):
                        change()
    for target in (reference, warm):
        target.release()


def test_what_is_synced_between_two_stages_is_in_the_second_one_s_state(model, policy, tmp_path):
    reference, warm = Reference(model), Policy(model, NLL(), AdamW(1e-3))

    def run_with(name, second):
        with Run(name, [warm, policy, reference], output=tmp_path) as run:
            for _ in run.steps(1, [warm]):
                run.log(warm.update(PROMPTS[:2]))
            warm.sync_weights(policy)
            policy.sync_weights(reference)
            return list(run.steps(1, second))

    with pytest.raises(ValueError, match=r"a reference changes.*in Run\(state=\[…\]\), and in steps\(total, \[…\]\)"):
        run_with("lost", [policy])
    assert run_with("whole", [policy, reference]) == [0]
    for target in (reference, warm):
        target.release()


def test_a_stage_that_the_loop_leaves_has_ended(model, policy, tmp_path):
    warm, rows = Policy(model, NLL(), AdamW(1e-3)), Rows(PROMPTS)
    options = {"output": tmp_path, "checkpoint_every": 1}

    def learn(resume, stop_at):
        with Run("left", [warm, policy, rows], resume=resume, **options) as run:
            for step in run.steps(9, [warm, rows]):
                run.log(warm.update(rows.take(2)))
                if step == 2:
                    break
            for step in run.steps(3, [policy, rows]):
                if step == stop_at:
                    raise KeyboardInterrupt
                rows.take(1)
        return [(record["stage"], record["step"]) for record in metrics(tmp_path / "left")]

    with pytest.raises(KeyboardInterrupt):
        learn(False, 2)
    of_warm, of_policy = [("sft", step) for step in range(3)], [("policy", step) for step in range(3)]
    assert learn(True, None) == of_warm + of_policy
    warm.release()


def test_two_objects_of_a_kind_have_names_and_marks_of_their_own(model, tmp_path):
    first, second = (Policy(model, NLL(), AdamW(1e-3)) for _ in range(2))
    easy, hard = Rows(PROMPTS[:4]), Rows(PROMPTS[4:])
    state = [first, second, easy, hard]
    with Run("two", state, output=tmp_path, checkpoint_every=1) as run:
        for _ in run.steps(1):
            run.log(first.update(easy.take(1)))
            second.update(hard.take(1))
    other = [first, second, Rows(PROMPTS[4:]), hard]
    with pytest.raises(ValueError, match="the data is another one"):
        Run("two", other, output=tmp_path, resume=True)
    with pytest.raises(ValueError, match="the data of rows-2 is another one"):
        Run("two", [first, second, easy, Rows(PROMPTS[:4])], output=tmp_path, resume=True)
    Run("two", state, output=tmp_path, resume=True).__enter__().__exit__(None, None, None)
    for one in (first, second):
        one.release()


def test_a_record_has_each_name_once_and_a_run_its_block(policy, rollout, tmp_path):
    with pytest.raises(TypeError, match="a Rollout is no part of a run's state"):
        Run("rollout", [policy, rollout], output=tmp_path)
    run = Run("names", [policy], output=tmp_path)
    with pytest.raises(RuntimeError, match=r"with Run\(…\) as run"):
        next(run.steps(1))
    with run:
        for _ in run.steps(1):
            for numbers in ({"reward": 2.0}, {"step": 1.0}):
                with pytest.raises(ValueError, match=r"run\.log has two numbers named"):
                    run.log({"reward": 1.0}, numbers)
            run.log({"reward": 1.0}, {"second/reward": 2.0})
    assert [record["second/reward"] for record in metrics(tmp_path / "names") if "reward" in record] == [2.0]


def test_a_rollout_that_draws_ahead_is_synced_by_ahead_and_can_be_evaluated_between_steps(policy, rollout, tmp_path):
    greedy = replace(SAMPLING, temperature=0.0, n=1)
    ahead = Ahead(rollout, policy, Rows(PROMPTS), reward, SAMPLING, prompts=2, steps=3)
    with ahead, Run("ahead", [policy, ahead], output=tmp_path) as run:
        for _ in run.steps(3):
            groups = ahead.groups()
            update = policy.update(policy.score(groups.batch()).with_advantages(GRPO))
            with pytest.raises(ValueError, match=r"an Ahead draws with this rollout.*ahead\.sync\(\)"):
                policy.sync_weights(rollout)
            ahead.sync()
            held_out = rollout.generate(PROMPTS, greedy).score(reward)
            assert {v for t in held_out.trajectories for v in t.weights_versions} - {-1} == {
                policy.engine.call("weights_version")
            }
            run.log(update, groups, held_out.held_out())
    policy.sync_weights(rollout)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_groups_of_a_step_behind_the_last_one_are_refused_and_not_waited_for(max_staleness, policy, rollout):
    ahead = Ahead(rollout, policy, Rows(PROMPTS), reward, SAMPLING, prompts=2, steps=2, max_staleness=max_staleness)
    with ahead:
        for _ in range(2):
            policy.update(policy.score(ahead.groups().batch()).with_advantages(GRPO))
        with pytest.raises(ValueError, match=r"draws for 2 steps, and these have been: Ahead\(…, steps=…\)"):
            ahead.groups()


def test_the_best_step_s_weights_come_back(policy, rollout, tmp_path):
    rewards, saved = {0: 1.0, 1: 3.0, 2: 2.0}, []
    with Run("best", [policy], output=tmp_path) as run:
        run.keep_best("held_out")
        for step in run.steps(3):
            policy.sync_weights(rollout)
            run.log(policy.update(batch_of(rollout, step)), {"held_out": rewards[step]})
            policy.save(tmp_path / str(step))
            saved.append((tmp_path / str(step) / "model.safetensors").read_bytes())
        assert run.load_best(policy) == 3.0
        policy.save(tmp_path / "best-model")
        with pytest.raises(ValueError, match="a policy changes in these steps that"):
            run.load_best(Policy(policy.model, GRPO, AdamW(1e-3)))
        # Who has later weights takes the best ones, as weights of a version of their own.
        reference, best = Reference(policy.model), load_model(str(tmp_path / "best-model"))
        policy.sync_weights(reference)
        policy.sync_weights(rollout)
        groups = drawn(rollout, 7)
        versions = {version for t in groups.trajectories for version in t.weights_versions} - {-1}
        assert versions == {policy.engine.call("weights_version")} == {4}
        tokens = [(t.tokens, t.logprobs) for t in groups.trajectories]
        fresh = Rollout(best)
        assert [(t.tokens, t.logprobs) for t in drawn(fresh, 7).trajectories] == tokens
        scored = [reference.score(groups.batch()).tokens.ref_logprobs for reference in (reference, Reference(best))]
        assert torch.equal(*scored)
    assert (tmp_path / "best-model" / "model.safetensors").read_bytes() == saved[1] != saved[2]


def test_an_input_of_the_loss_that_no_model_has_given_is_refused_by_the_update(model, rollout):
    """Behind the advantages a reference scores the rows alone that the loss reads."""
    objective = GRPO.replace(kl=rl_fn.components.KL("k3", 0.02))
    policy, reference = Policy(model, objective, AdamW(1e-3)), Reference(model)
    with policy, reference:
        policy.sync_weights(rollout)
        batch = rollout.generate(PROMPTS[:2], SAMPLING).score(reward).batch().with_advantages(objective)
        with pytest.raises(ValueError, match=r"reads ref_logprobs, which reference\.score\(batch\) gives"):
            policy.update(batch)
        assert policy.update(reference.score(batch))["kl"] == 0  # the same micro-batches: equal weights, equal bits


def other_reward(completion, row):
    return -reward(completion, row)


def scaled(completion, row, by):
    return by * reward(completion, row)


OTHER_SETTINGS = "the run before had other settings than the program has now"
# Settings that stand in no object of the state: name → (what changes in a resumed run, words of the remark).
SETTINGS = {
    "a seed": ({"seed": 7}, None),
    "steps": ({"steps": 4}, "(policy, steps): steps 3 → 4"),
    "sampling": (
        {"max_new_tokens": 2, "n": 4},
        "(policy, groups 0): sampling.max_new_tokens 3 → 2; sampling.n 2 → 4",
    ),
    "a schedule": ({"schedule": True}, None),
    "a partial": ({"reward": partial(scaled, by=-1.0)}, "(policy, groups 0): the reward or its file '"),
    "a reward": ({"reward": other_reward}, "(policy, groups 0): the reward or its file '"),
    "its weight": ({"weights": [2.0], "overlong_buffer": 1}, "(policy, groups 0): score.overlong_buffer None → 1; the"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SETTINGS)
def test_what_a_resumed_loop_does_otherwise_is_named(case, model, tmp_path, capsys):
    changed, words = SETTINGS[case]
    first = {"a schedule": changed, "a partial": {"reward": partial(scaled, by=1.0)}}.get(case, {})

    def loop(resume, steps=3, reward=reward, seed=0, weights=(), overlong_buffer=None, schedule=False, **sampling):
        rollout, policy = Rollout(model), Policy(model, GRPO, AdamW(1e-3))
        sampling = SamplingParams(**{"n": 2, "max_new_tokens": 3, **sampling})
        run = Run("loop", [policy], output=tmp_path, resume=resume, checkpoint_every=1)
        with run, rollout, policy:
            for step in run.steps(steps):
                if step == 2 and not resume:
                    raise KeyboardInterrupt
                policy.sync_weights(rollout)
                longer = replace(sampling, max_new_tokens=3 + step) if schedule else sampling
                groups = rollout.generate(PROMPTS[:2], replace(longer, seed=seed + step))
                groups = groups.score(reward, weights, overlong_buffer=overlong_buffer)
                run.log(policy.update(groups.batch().with_advantages(GRPO)), groups)

    with pytest.raises(KeyboardInterrupt):
        loop(resume=False, **first)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    loop(resume=True, **changed)
    named = [line for line in capsys.readouterr().out.splitlines() if OTHER_SETTINGS in line]
    assert len(named) == (0 if words is None else 1) and (words or "") in "".join(named)
