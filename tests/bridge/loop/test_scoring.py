"""A policy learns from the distribution that it scores, or the update is refused with the call that mends it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Model,
    ParallelConfig,
    Policy,
    Reference,
    Rollout,
    RolloutOptions,
    Run,
    SamplingParams,
    ScoringConfig,
    Teacher,
    Turns,
)
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.pipelines.objective_options import CorrectionOptions, objective_options
from rl_train.policy_configs import quickstart

GRPO = rl_fn.recipes.grpo().replace(kl=None)
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)


def batch_of(rollout):
    groups = rollout.generate([{"prompt": "1+1="}, {"prompt": "2+1="}], SAMPLING)
    return groups.score(lambda completion, row: completion.count("1") - len(completion)).batch()


@pytest.fixture(scope="module")
def batch(model):
    return batch_of(Rollout(model)).with_advantages(GRPO)


ROUNDED = ParallelConfig(param_dtype=torch.bfloat16)
SCORINGS = {
    "as sampled": {},
    "bfloat16": {"scoring": ScoringConfig(dtype="bfloat16")},
    "rounded weights": {"parallel": ROUNDED},
    "softcap": {"scoring": ScoringConfig(softcap=30.0)},
    "temperature": {"scoring": ScoringConfig(temperature=0.7)},
}


@pytest.mark.parametrize("scoring", [name for name in SCORINGS if name != "temperature"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_distribution_that_was_not_sampled_from_is_scored_first(model, batch, scoring, exact):
    """Rounded weights passed for exact ones."""
    policy, scoring = Policy(model, GRPO, AdamW(1e-3), **SCORINGS[scoring]), SCORINGS[scoring]
    batch = replace(batch, groups=replace(batch.groups, exact=exact))
    if scoring or not exact:
        with pytest.raises(ValueError, match=r"no ratio would start at 1: batch = policy\.score\(batch\)"):
            policy.update(batch)
        batch = policy.score(batch)
    assert policy.update(batch)["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    policy.release()


def test_a_rollout_knows_whether_it_is_exact(model):
    rollout = Rollout(model, RolloutOptions(precision="int8"))
    assert not batch_of(rollout).groups.exact
    rollout.release()


def test_another_temperature_is_refused(model, batch):
    policy = Policy(model, GRPO, AdamW(1e-3), scoring=ScoringConfig(temperature=0.5))
    with pytest.raises(ValueError, match=r"sampled at temperature 1\.0, the policy is scored at 0\.5"):
        policy.update(batch)


@pytest.mark.parametrize("scoring", [name for name in SCORINGS if name != "as sampled"])
def test_a_reference_that_scores_otherwise_is_refused(model, batch, scoring):
    policy, other = Policy(model, GRPO, AdamW(1e-3)), Reference(model, **SCORINGS[scoring])
    with policy, other, Reference(model) as reference:
        with pytest.raises(ValueError, match="the KL of a model to its own copy would not be 0"):
            policy.update(other.score(batch))
        policy.update(reference.score(batch))


@pytest.mark.parametrize("option", [{"micro_batch_tokens": 64}, {"packing": True}, {"share_prefixes": False}], ids=str)
def test_a_reference_whose_rows_lie_otherwise_is_the_same_one(model, batch, option):
    objective = GRPO.replace(kl=rl_fn.components.KL("k3", 0.1))
    parts = Policy(model, objective, AdamW(1e-3)), Reference(model, scoring=ScoringConfig(**option))
    with parts[0] as policy, parts[1] as reference:
        scored = reference.score(batch.with_advantages(objective))
        assert policy.update(scored)["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_policy_and_a_reference_with_rounded_weights_agree(model, batch):
    objective = GRPO.replace(kl=rl_fn.components.KL("k3", 0.1))
    parts = Policy(model, objective, AdamW(1e-3), parallel=ROUNDED), Reference(model, parallel=ROUNDED)
    with parts[0] as policy, parts[1] as reference:
        scored = policy.score(reference.score(batch.with_advantages(objective)))
        assert policy.update(scored)["kl"] == 0.0


def test_a_teacher_has_the_policy_s_temperature_and_vocabulary(model, batch):
    policy, teacher = Policy(model, GRPO, AdamW(1e-3)), Teacher(model, model, scoring=ScoringConfig(temperature=0.5))
    with pytest.raises(ValueError, match=r"the teacher with .*temperature=0\.5"):
        policy.update(teacher.score(batch))
    tokenizer = character_tokenizer("=+9876543210")
    other = Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    with pytest.raises(ValueError, match="the teacher has another vocabulary than the policy"):
        Teacher(other, model)
    for engine in (policy, teacher):
        engine.release()


def test_a_controller_is_of_a_term_with_its_coefficient(model, batch):
    in_loss = GRPO.replace(kl=rl_fn.components.KL("k3", 0.02))
    for objective, control, words in (
        (GRPO, {"kl": rl_fn.fixed_kl(0.02)}, "grpo has no term 'kl'"),
        (in_loss, {"loss": rl_fn.fixed_kl(0.02)}, "grpo has no term 'loss'"),
        (in_loss, {"kl": rl_fn.fixed_kl(0.2)}, "kl begins at 0.2, and the objective has 0.02"),
        (NLL(), {"kl": rl_fn.fixed_kl(0.02)}, r"NLL\(\) has no coefficient"),
    ):
        with pytest.raises(ValueError, match=words):
            Policy(model, objective, AdamW(1e-3), control=control)
    in_reward = GRPO.replace(reward_kl=rl_fn.components.KL("k1", 0.02))
    policy, reference = (
        Policy(model, in_reward, AdamW(1e-3), control={"reward_kl": rl_fn.linear_kl(1.0, 0.02)}),
        Reference(model),
    )
    scored = reference.score(batch.groups.batch())
    with pytest.raises(ValueError, match=r"with_advantages\(objective, coefficients=policy\.coefficients\)"):
        policy.update(scored.with_advantages(in_reward))
    weighed = scored.with_advantages(in_reward, coefficients=policy.coefficients)
    policy.update(weighed, updates=0)  # of a critic's first steps, in which the policy does not move
    assert policy.coefficients == pytest.approx({"reward_kl": 0.02})
    policy.update(weighed)
    assert policy.settings()["control"] != {"reward_kl": [0.02] * 6}
    for engine in (policy, reference):
        engine.release()


def test_objects_of_the_same_turns_are_called_one_at_a_time(model, monkeypatch):
    moves = []

    class Noted(Turns):
        """Turns on slots that are no accelerators: the moves are noted."""

        def add(self, engine):
            name = engine.name.removeprefix("loop/").partition("-")[0]
            for move in ("cpu", "cuda"):
                monkeypatch.setattr(engine, move, lambda move=move: moves.append(f"{name}: {move}"))
            engine.before_call = self.take

    turns = Noted()
    rollout, reference, policy = (
        Rollout(model, turns=turns),
        Reference(model, turns=turns),
        Policy(model, GRPO, AdamW(1e-3), turns=turns),
    )
    policy.sync_weights(rollout)
    moves.clear()
    batch = batch_of(rollout)
    assert moves == ["policy: cpu"]
    batch = reference.score(batch).with_advantages(GRPO)
    policy.update(batch)
    assert moves[1:] == ["rollout: cpu", "reference: cuda", "reference: cpu", "policy: cuda"]
    for engine in (rollout, reference, policy):
        engine.release()


def test_an_engine_that_a_sync_replaces_is_counted_and_said(model, batch, monkeypatch, capsys):
    policy = Policy(model, GRPO, AdamW(1e-3))
    assert not any(name.startswith("weights/") for name in policy.update(batch))
    rollout = SimpleNamespace(engine=SimpleNamespace(methods=("take_weights", "prove_weights")))

    def sync(_, adapter):
        assert adapter is None
        policy.engine.replaced_engines += 1
        policy.engine.last_sync = SimpleNamespace(not_compared=2, replaced=["slot 0 held other weights"])

    monkeypatch.setattr(policy.engine, "sync_weights", sync)
    policy.sync_weights(rollout)
    metrics = policy.update(batch)
    assert (metrics["weights/engine_replaced"], metrics["weights/not_compared"]) == (1.0, 2.0)
    assert "step 1: 1 engines of the rollout were replaced" in capsys.readouterr().out
    assert policy.update(batch)["weights/engine_replaced"] == 0.0
    policy.release()


def test_a_reference_that_follows_belongs_to_the_state(model, batch, tmp_path):
    policy, reference = Policy(model, GRPO, AdamW(1e-3)), Reference(model)
    policy.sync_weights(reference)  # before the first stage: the same in a resumed run

    def steps(name, state, every):
        with Run(name, state=state, output=tmp_path) as run:
            for step in run.steps(3):
                if step == every:
                    policy.sync_weights(reference)
                run.log(policy.update(batch))

    steps("fixed", [policy], None)
    steps("followed", [policy, reference], 1)
    with pytest.raises(ValueError, match=r"no checkpoint of these steps has it.*Name the reference in Run\(state="):
        steps("lost", [policy], 1)
    assert len((tmp_path / "lost" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_reference_may_be_a_moving_average(model, batch, tmp_path):
    """θ_ref ← 0.25 θ + 0.75 θ_ref, by the exported weights; a resumed run has it too, for it is in the state."""
    policy, reference = Policy(model, GRPO, AdamW(0.1)), Reference(model)

    def weights(part, name):
        part.save(tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    before = weights(reference, "before")
    for _ in range(2):
        policy.update(batch)
    policy.sync_weights(reference, share=0.25)
    of_policy, after = weights(policy, "policy"), weights(reference, "after")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name in before:
        torch.testing.assert_close(after[name], 0.25 * of_policy[name] + 0.75 * before[name], rtol=1e-6, atol=1e-7)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"a share in \(0, 1\]"):
            policy.sync_weights(reference, share=share)
    with pytest.raises(ValueError, match="a share of the weights is for a Reference"):
        policy.sync_weights(Policy(model, GRPO, AdamW(0.1)), share=0.5)


@pytest.mark.parametrize("share", [2.0**-40, 0.25, 1 - 2.0**-40, 1.0])
def test_a_reference_is_held_twice_only_where_some_of_it_stays(model, share, monkeypatch):
    policy, reference = Policy(model, GRPO, AdamW(0.1)), Reference(model)
    calls, call = [], reference.engine.call
    monkeypatch.setattr(reference.engine, "call", lambda name, *given: (calls.append(name), call(name, *given))[1])
    policy.sync_weights(reference, share=share)
    of_the_mean = [name for name in calls if name in ("copy_weights", "average_weights")]
    assert of_the_mean == (["copy_weights", "average_weights"] if share < 1 else [])


OF_OLD = {
    "TIS": GRPO.replace(correction=rl_fn.components.TIS()),
    "IcePop": GRPO.replace(correction=rl_fn.components.IcePop()),
    "Rejection": GRPO.replace(correction=rl_fn.components.Rejection(0.1)),
    "a product": GRPO.replace(
        correction=rl_fn.components.Product((rl_fn.components.VACOMask(0.1), rl_fn.components.TIS()))
    ),
    "decoupled_ppo": rl_fn.recipes.decoupled_ppo(),
}
OF_POLICY = {
    "VACO": GRPO.replace(correction=rl_fn.components.VACOMask(0.1)),
    "DPPO": GRPO.replace(loss=rl_fn.components.DPPO()),
    "none": GRPO,
}


@pytest.mark.parametrize("name", [*OF_OLD, *OF_POLICY])
def test_what_reads_the_old_policy_over_the_rollout_s_is_refused_until_the_old_policy_was_scored(model, batch, name):
    """Else it is 1 on every token, and corrects nothing."""
    objective = (OF_OLD | OF_POLICY)[name]
    batch = batch.groups.batch().with_advantages(objective)
    with Policy(model, objective, AdamW(1e-3)) as policy:
        if name in OF_OLD:
            with pytest.raises(ValueError, match=r"reads π_old/μ.* batch = policy\.score\(batch\) gives π_old"):
                policy.update(batch, stale=True)
            policy.update(batch, updates=0, stale=True)
            batch = policy.score(batch)
        assert "policy_loss" in policy.update(batch, stale=True)
    options = replace(quickstart(), objective=objective_options("grpo"))
    command = {"correction": CorrectionOptions(kind=name.lower())} if name in ("TIS", "IcePop") else None
    own = objective_options("decoupled_ppo") if name == "decoupled_ppo" else command
    if own is not None:
        own = objective_options("grpo", **own) if isinstance(own, dict) else own
        with pytest.raises(ValueError, match=r"--policy\.recompute-old-logprobs"):
            replace(options, objective=own)
        replace(options, objective=own, policy=replace(options.policy, recompute_old_logprobs=True))


OF_REWARD = {
    "reward_kl": GRPO.replace(reward_kl=rl_fn.components.KL("k1", 0.1)),
    "distillation": rl_fn.recipes.on_policy_distillation(),
}


@pytest.mark.parametrize("name", OF_REWARD)
def test_the_old_policy_is_scored_before_the_advantages_that_read_it(model, batch, name):
    objective = OF_REWARD[name]
    start = batch.groups.batch()
    given = start.with_fields(ref_logprobs=start.tokens.old_logprobs, teacher_logprobs=start.tokens.old_logprobs - 1.0)
    with Policy(model, objective, AdamW(1e-3)) as policy:
        with pytest.raises(ValueError, match=r"policy\.score\(groups\.batch\(\)\) comes first"):
            policy.score(given.with_advantages(objective))
        policy.update(policy.score(policy.score(given).with_advantages(objective)), stale=True)


def test_what_was_scored_of_the_rows_in_a_loss_is_no_input_of_other_advantages(model, batch):
    with Policy(model, GRPO, AdamW(1e-3)) as policy, Reference(model) as reference:
        whole = policy.score(reference.score(batch.groups.batch()))
        whole.with_advantages(GRPO).with_advantages(OF_REWARD["reward_kl"])
        for scorer, name in ((reference, "ref_logprobs"), (policy, "old_logprobs")):
            part = scorer.score(whole.groups.batch().with_advantages(GRPO))
            ready = part if name == "ref_logprobs" else part.with_fields(ref_logprobs=part.tokens.old_logprobs)
            with pytest.raises(ValueError, match=f"reads {name}, which a model gave behind earlier advantages"):
                ready.with_advantages(OF_REWARD["reward_kl"])
        reference.score(batch.groups.batch().with_advantages(GRPO)).with_advantages(GRPO)
