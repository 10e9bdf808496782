"""A reference of comparisons scores as the policy does, or its log-probabilities are refused."""

from dataclasses import fields

import pytest
import torch

from rl_bridge import AdamW, ParallelConfig, Policy, Reference, ScoringConfig, load_rows, preference_loss
from rl_bridge.modules.comparison import PREFERENCE_LOSSES

REFERENCED = [name for name in PREFERENCE_LOSSES if preference_loss(name).needs_reference]
ROWS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "1", "gold": "2", "margin": 0.5} for n in range(1, 9)]
OTHER = {"temperature": 0.7, "softcap": 3.0, "dtype": "bfloat16"}
"""Values that change a token's probability, by the option."""
ALIKE = {"micro_batch_tokens": 64, "share_prefixes": False, "packing": True}
"""Values that say where rows lie, with the same results."""
REFUSED = "a policy that has not moved would differ from its reference"
NO_TEMPERATURE = r"comparisons learns from the data's own distribution, which has no temperature, got 0\.7"


@pytest.fixture(autouse=True)
def released(model):
    made = []
    yield lambda one: made.append(one) or one
    for one in made:
        one.release()


def batches(model, loss, reference):
    """A batch that is scored in its step, a part of it, and one of rows that were scored before."""
    rows = load_rows(ROWS, model, loss)
    scored = reference.score(rows.all())
    reference.cache(rows)
    return {"scored": scored, "cut": scored.rows(slice(0, 2)), "cached": rows.batch(2), "all": rows.all()}


def test_each_option_of_scoring_is_of_one_kind():
    assert {field.name for field in fields(ScoringConfig)} == {*OTHER, *ALIKE}


@pytest.mark.long
@pytest.mark.parametrize("name", REFERENCED)
def test_no_loss_reads_a_reference_that_scores_otherwise(model, released, name):
    """log π of one distribution less log π_ref of another: every margin was wrong, without a word."""
    loss = preference_loss(name)
    plain, capped = (released(Policy(model, loss, AdamW(1e-4), scoring=s)) for s in (None, ScoringConfig(softcap=3.0)))
    of_plain = batches(model, loss, released(Reference(model)))
    for batch in of_plain.values():
        for call in (capped.update, capped.held_out):
            with pytest.raises(ValueError, match=REFUSED):
                call(batch)
        plain.held_out(batch)
    plain.update(of_plain["cached"])


@pytest.mark.parametrize("name", OTHER)
def test_each_option_that_changes_a_probability_is_compared(model, released, name):
    loss, scoring = preference_loss("dpo"), ScoringConfig(**{name: OTHER[name]})
    plain, reference = released(Policy(model, loss, AdamW(1e-4))), released(Reference(model, scoring=scoring))
    rows = load_rows(ROWS, model, loss)
    if name == "temperature":
        for call in (lambda: reference.score(rows.all()), lambda: reference.cache(rows)):
            with pytest.raises(ValueError, match=NO_TEMPERATURE):
                call()
    else:
        of_other = batches(model, loss, reference)
        policy = released(Policy(model, loss, AdamW(1e-4), scoring=scoring))
        for batch in of_other.values():
            with pytest.raises(ValueError, match=REFUSED):
                plain.update(batch)
            # Its own reference is one that scores alike: nothing has moved, and every reward is 0.
            assert policy.held_out(batch)["held_out_chosen_reward"] == 0.0
        policy.update(of_other["scored"])


def test_a_reference_with_rounded_weights_is_another_one(model, released):
    loss, rounded = preference_loss("dpo"), {"parallel": ParallelConfig(param_dtype=torch.bfloat16)}
    plain, policy = released(Policy(model, loss, AdamW(1e-4))), released(Policy(model, loss, AdamW(1e-4), **rounded))
    of_other = batches(model, loss, released(Reference(model, **rounded)))
    for batch in of_other.values():
        with pytest.raises(ValueError, match=REFUSED):
            plain.update(batch)
        assert policy.held_out(batch)["held_out_chosen_reward"] == 0.0
    policy.update(of_other["scored"])


def test_where_rows_lie_and_a_loss_without_a_reference_are_no_cause(model, released):
    loss = preference_loss("dpo")
    policy, reference = (
        released(Policy(model, loss, AdamW(1e-4))),
        released(Reference(model, scoring=ScoringConfig(**ALIKE))),
    )
    of_alike = batches(model, loss, reference)
    for batch in of_alike.values():
        assert policy.held_out(batch)["held_out_chosen_reward"] == pytest.approx(0.0, abs=1e-5)
    policy.update(of_alike["scored"])
    without = released(Policy(model, preference_loss("simpo"), AdamW(1e-4), scoring=ScoringConfig(softcap=3.0)))
    without.update(of_alike["scored"])
