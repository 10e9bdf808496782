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
def test_a_frozen_model_of_other_weights_is_named_by_a_resumed_loop(kind, model, tmp_path, capsys):
    """The penalty was from another model, without a word."""
    for name, seed in (("one", 1), ("two", 2)):
        with Policy(Model(replace(model.source, seed=seed), model.tokenizer), NLL(), AdamW(1e-3)) as other:
            other.save(tmp_path / name)
    one, two = (load_model(tmp_path / name) for name in ("one", "two"))
    for output in ("same", "other"):
        with pytest.raises(KeyboardInterrupt):
            frozen_loop(kind, model, one, tmp_path / output, resume=False)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    frozen_loop(kind, model, one, tmp_path / "same", resume=True)
    assert OTHER_SETTINGS not in capsys.readouterr().out
    if kind == "a cached reference":
        with pytest.raises(ValueError, match="reference's model"):
            frozen_loop(kind, model, two, tmp_path / "other", resume=True)
    else:
        frozen_loop(kind, model, two, tmp_path / "other", resume=True)
        word, stage = kind.split()[1], "preference" if "pairs" in kind else "policy"
        assert f"({stage}, {word}): {word}'s model '" in capsys.readouterr().out


# What an evaluation has otherwise in the resumed run, and the words of the remark.
EVALUATIONS = {
    "nothing": ({}, None),
    "other prompts": ({"prompts": PROMPTS[2:5]}, "(policy, evaluation 0): prompts '"),
    "another limit": ({"max_new_tokens": 2}, "(policy, evaluation 0): sampling.max_new_tokens 3 → 2"),
    "another reward": ({"by": shorter}, "(policy, evaluation 0): the reward or its file '"),
    "another k": ({"pass_at": [2]}, "(policy, evaluation 0): pass_at [1] → [2]"),
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
