"""A resumed loop names frozen models and evaluations that are others than before: no checkpoint has these."""

from dataclasses import replace

import pytest

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Model,
    Policy,
    Reference,
    Rollout,
    Run,
    SamplingParams,
    Teacher,
    load_model,
    load_rows,
    preference_loss,
)

GRPO, DISTILLED = rl_fn.recipes.grpo(), rl_fn.recipes.on_policy_distillation()
DPO = preference_loss("dpo")
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(4)]
SAMPLING = SamplingParams(n=2, max_new_tokens=3)
OTHER_SETTINGS = "the run before had other settings than the program has now"


def reward(completion, row):
    return completion.count("1") - len(completion)


def shorter(completion, row):
    return -float(len(completion))


@pytest.fixture
def two_models(model, tmp_path):
    """Folders of two models with other weights, loaded."""
    for name, seed in (("one", 1), ("two", 2)):
        with Policy(Model(replace(model.source, seed=seed), model.tokenizer), NLL(), AdamW(1e-3)) as other:
            other.save(tmp_path / name)
    return [load_model(tmp_path / name) for name in ("one", "two")]


def drawn(rollout, step):
    return rollout.generate(PROMPTS[:2], replace(SAMPLING, seed=step)).score(reward)


def frozen_loop(kind, model, frozen, output, resume):
    """Two steps with a frozen model beside the policy; the first session ends before the second."""
    objective = {"a reference": GRPO, "a teacher": DISTILLED}.get(kind, DPO)
    policy, rollout = Policy(model, objective, AdamW(1e-3)), Rollout(model)
    beside = Teacher(frozen, model) if kind == "a teacher" else Reference(frozen)
    rows = load_rows(PAIRS, model, DPO)
    if kind == "a cached reference":
        beside.cache(rows)
    with policy, rollout, beside, Run("loop", [policy, rows], output=output, resume=resume, checkpoint_every=1) as run:
        for step in run.steps(2):
            if step and not resume:
                raise KeyboardInterrupt
            if objective is DPO:
                pairs = rows.batch(2)
                run.log(policy.update(pairs if kind == "a cached reference" else beside.score(pairs)))
            else:
                policy.sync_weights(rollout)
                batch = beside.score(drawn(rollout, step).batch())
                run.log(policy.update(batch.with_advantages(objective)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a reference", "a teacher", "a reference of pairs", "a cached reference"])
def test_a_frozen_model_of_other_weights_is_named_by_a_resumed_loop(kind, model, two_models, tmp_path, capsys):
    """The penalty was from another model, without a word."""
    one, two = two_models
    for output in ("same", "other"):
        with pytest.raises(KeyboardInterrupt):
            frozen_loop(kind, model, one, tmp_path / output, resume=False)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    frozen_loop(kind, model, one, tmp_path / "same", resume=True)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    frozen_loop(kind, model, two, tmp_path / "other", resume=True)
    words = {
        "a reference": "(policy, reference): reference's model '",
        "a teacher": "(policy, teacher): teacher's model '",
        "a reference of pairs": "(preference, reference): reference's model '",
        "a cached reference": "(preference, cached reference): reference's model '",
    }
    assert words[kind] in capsys.readouterr().out


# What an evaluation has otherwise in the resumed run, and the words of the remark.
EVALUATIONS = {
    "nothing": ({}, None),
    "other prompts": ({"prompts": PROMPTS[2:5]}, "(policy, evaluation): prompts '"),
    "another limit": ({"max_new_tokens": 2}, "(policy, evaluation): sampling.max_new_tokens 3 → 2"),
    "another reward": ({"by": shorter}, "(policy, evaluation): the reward or its file '"),
    "another k": ({"pass_at": [2]}, "(policy, evaluation): pass_at [1] → [2]"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", EVALUATIONS)
def test_another_evaluation_than_before_is_named_by_a_resumed_loop(case, model, tmp_path, capsys):
    """The best step was chosen among numbers of two evaluations, without a word."""

    def loop(resume, prompts=PROMPTS[2:4], by=reward, pass_at=(1,), **sampling):
        rollout, policy = Rollout(model), Policy(model, GRPO.replace(kl=None), AdamW(1e-3))
        held = replace(SAMPLING, **sampling)
        with policy, rollout, Run("loop", [policy], output=tmp_path, resume=resume, checkpoint_every=1) as run:
            run.keep_best("held_out")
            for step in run.steps(3):
                if step == 2 and not resume:
                    raise KeyboardInterrupt
                policy.sync_weights(rollout)
                update = policy.update(drawn(rollout, step).batch().with_advantages(policy.objective))
                policy.sync_weights(rollout)
                evaluated = rollout.generate(prompts, replace(held, seed=100 + step)).score(by)
                run.log(update, evaluated.held_out(pass_at=pass_at))

    with pytest.raises(KeyboardInterrupt):
        loop(resume=False)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    changed, words = EVALUATIONS[case]
    loop(resume=True, **changed)
    named = [line for line in capsys.readouterr().out.splitlines() if OTHER_SETTINGS in line]
    assert len(named) == (0 if words is None else 1) and (words or "") in "".join(named)


@pytest.mark.long
def test_a_reference_may_be_gone_when_its_step_ends(model, two_models, tmp_path, capsys):
    """Each step makes and leaves one: neither its end nor the run's notes keep it."""
    policy, rows = Policy(model, DPO, AdamW(1e-3)), load_rows(PAIRS, model, DPO)
    with policy, Run("loop", [policy, rows], output=tmp_path, checkpoint_every=1) as run:
        for _ in run.steps(3):
            with Reference(two_models[0]) as reference:
                batch = reference.score(rows.batch(2))
            run.log(policy.update(batch))
    assert len(run._run.cached_result("noted/preference, reference", dict)["all"]) == 1
    assert OTHER_SETTINGS not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "resumed", "is_named"), [("01", "01", False), ("00", "11", True), ("01", "10", False)]
)
def test_references_that_take_turns_are_known_whatever_their_order(
    begun, resumed, is_named, model, two_models, tmp_path, capsys
):
    def loop(turns, resume):
        policy, rows = Policy(model, DPO, AdamW(1e-3)), load_rows(PAIRS, model, DPO)
        references = [Reference(one) for one in two_models]
        run = Run("loop", [policy, rows], output=tmp_path, resume=resume, checkpoint_every=1)
        with policy, references[0], references[1], run:
            for step in run.steps(4):
                if step == 2 and not resume:
                    raise KeyboardInterrupt
                run.log(policy.update(references[int(turns[step % 2])].score(rows.batch(2))))

    with pytest.raises(KeyboardInterrupt):
        loop(begun, resume=False)
    loop(resumed, resume=True)
    assert (OTHER_SETTINGS in capsys.readouterr().out) == is_named


@pytest.mark.long
def test_each_stage_has_its_own_reference(model, two_models, tmp_path, capsys):
    """A resumed run that goes on in the second stage sees the first stage's reference no more."""

    def loop(frozen, resume):
        first, second = (Policy(model, DPO, AdamW(1e-3)) for _ in range(2))
        rows, reference = load_rows(PAIRS, model, DPO), Reference(frozen)
        run = Run("loop", [first, second, rows], output=tmp_path, resume=resume, checkpoint_every=1)
        with first, second, reference, run:
            for policy in (first, second):
                for step in run.steps(2, [policy, rows]):
                    if policy is second and step and not resume:
                        raise KeyboardInterrupt
                    run.log(policy.update(reference.score(rows.batch(2))))

    with pytest.raises(KeyboardInterrupt):
        loop(two_models[0], resume=False)
    loop(two_models[1], resume=True)
    assert "(preference-2, reference): reference's model '" in capsys.readouterr().out
