"""Laws over every recipe with everything switched on: a new one is in rl_fn.recipes.__all__ and cannot escape."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.recipe_batches import (
    COLUMNS,
    FLOATS,
    OBJECTIVES,
    WIDTH,
    advantages,
    batch,
    close,
    loss_alone,
    mapped,
    rollouts,
    run,
)
from tests.rl_fn.registry import RECIPES, Draw

# A statistic of all tokens passed in decides which of them count.
OVER_BATCH = {"clip_cov", "kl_cov", "m2po"}
# At ratio 1 the gradient is not REINFORCE's.
NOT_REINFORCE = {
    "luspo": "a completion weighs by its length",
    "clip_cov": "tokens of high covariance are dropped at any ratio",
    "vapo": "the language-model loss on correct completions is added",
}
# A group of one is refused: it has no others, or fewer completions than a set.
NEEDS_A_GROUP = {"rloo": "group of at least 2", "passk": "between 1 and the group's size"}


@pytest.mark.parametrize("name", RECIPES)
def test_random_equal_and_masked_batches_are_finite(name):
    objective = OBJECTIVES[name]
    drawn = batch(objective, 1)
    nothing = drawn._replace(mask=np.zeros_like(drawn.mask))
    for of in (drawn, batch(objective, 2, equal=True), nothing):
        outcome = run(objective, of)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome))
    assert outcome.value == 0.0 and not any(g.any() for g in outcome.gradient.values())
    assert np.asarray(run(objective, drawn).gradient["logprobs"]).any()


@pytest.mark.parametrize("name", RECIPES)
def test_a_group_of_one_is_finite_or_refused(name):
    objective = OBJECTIVES[name]
    if name in NEEDS_A_GROUP:
        with pytest.raises(ValueError, match=NEEDS_A_GROUP[name]):
            batch(objective, 3, prompts=8, group=1)
        return
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(objective, batch(objective, 3, prompts=8, group=1)))
    )


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_flows_into_the_policy_alone(name):
    of = batch(OBJECTIVES[name], 4)
    gradient = run(OBJECTIVES[name], of).gradient
    assert {field for field in FLOATS if np.asarray(gradient[field]).any()} == {"logprobs", "entropies"}
    assert not any(np.asarray(g)[~of.mask].any() for g in gradient.values())


@pytest.mark.parametrize("name", RECIPES)
def test_junk_at_masked_positions_is_harmless(name):
    of = batch(OBJECTIVES[name], 5)
    junk = np.random.default_rng(0).choice(np.array([np.nan, np.inf, -np.inf], np.float32), size=of.mask.shape)
    dirty = {field: np.where(of.mask, getattr(of, field), junk) for field in FLOATS}
    dirty["correct"] = of.correct | ~of.mask
    outcomes = [run(OBJECTIVES[name], b) for b in (of, of._replace(**dirty))]
    for a, b in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", RECIPES)
def test_junk_at_masked_positions_reaches_no_advantage(name):
    objective = OBJECTIVES[name]
    read = rollouts(objective, 5)
    tokens = ("old_logprobs", "ref_logprobs", "teacher_logprobs")
    dirty = read._replace(**{field: np.where(read.mask, getattr(read, field), np.nan) for field in tokens})
    dirty = dirty._replace(values=np.where(read.mask, read.values, np.inf))
    clean = advantages(objective, read)
    np.testing.assert_array_equal(clean, advantages(objective, dirty))


@pytest.mark.parametrize("name", sorted(set(RECIPES) - OVER_BATCH))
def test_micro_batches_add_up(name):
    """Any partition of the rows; those of the other parts are masked, which must be the same as their absence."""
    objective = OBJECTIVES[name]
    assert not objective.over_batch
    of = batch(objective, 6)
    part = np.random.default_rng(6).integers(3, size=len(of.mask))
    whole = run(objective, of)
    parts = [run(objective, of._replace(mask=of.mask & (part == i)[:, None])) for i in range(3)]
    added = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    close(whole, added)


def test_exceptions_to_micro_batches_are_those_with_a_statistic_of_the_batch():
    assert {name for name in RECIPES if OBJECTIVES[name].over_batch} == OVER_BATCH


@pytest.mark.parametrize("name", RECIPES)
def test_the_side_of_the_padding_and_the_order_of_rows_do_not_matter(name):
    objective, of = OBJECTIVES[name], batch(OBJECTIVES[name], 7)
    whole = run(objective, of)
    shift = COLUMNS - WIDTH
    close(whole, run(objective, mapped(lambda x: np.roll(x, shift, -1), of)), lambda g: np.roll(g, -shift, -1))
    order = np.random.default_rng(7).permutation(len(of.mask))
    close(whole, run(objective, mapped(lambda x: x[order], of)), lambda g: np.asarray(g)[np.argsort(order)])


@pytest.mark.parametrize("name", RECIPES)
def test_the_order_of_groups_and_answers_does_not_matter_to_advantages(name):
    objective = OBJECTIVES[name]
    read = rollouts(objective, 8)
    expected = np.asarray(advantages(objective, read))
    turned = read._replace(**{field: x[::-1] for field, x in read._asdict().items() if x is not None})
    np.testing.assert_allclose(advantages(objective, turned)[::-1], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_packed_batch_is_the_padded_one(name):
    objective, of = OBJECTIVES[name], batch(OBJECTIVES[name], 9)
    ids = np.repeat(np.arange(len(of.mask), dtype=np.int32), COLUMNS)[None]
    packed = mapped(lambda x: x.reshape(1, -1), of)._replace(segment_ids=ids)
    close(run(objective, of), run(objective, packed), lambda g: np.reshape(g, of.mask.shape))


@pytest.mark.parametrize("name", RECIPES)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    objective = OBJECTIVES[name]
    of = batch(objective, 10)
    # Large enough for Clip-Cov to find tokens of high covariance.
    completions = Draw(10).normal(len(of.mask), 1, scale=3.0)
    of = of._replace(advantages=np.where(of.mask, completions, 0.0).astype(np.float32))
    of = of._replace(logprobs=of.old_logprobs, rollout_logprobs=of.old_logprobs)
    if name == "kl_cov":
        # Its |log ρ| has a kink at ratio 1, where the derivative is a matter of convention.
        objective = objective.replace(loss=rl_fn.components.KLCov(coef=0.0))
    plain = dataclasses.replace(loss_alone(objective), loss=rl_fn.components.Reinforce(), correction=None)
    got, expected = (np.asarray(run(o, of).gradient["logprobs"]) for o in (objective, plain))
    same = np.allclose(got, expected, rtol=2e-5, atol=1e-6)
    assert same == (name not in NOT_REINFORCE)


@pytest.mark.parametrize("name", RECIPES)
def test_without_advantage_there_is_no_gradient_but_of_losses_that_say_so(name):
    objective = OBJECTIVES[name].replace(kl=None, entropy=None)
    of = batch(objective, 11)
    moved = np.asarray(run(objective, of._replace(advantages=np.zeros_like(of.advantages))).gradient["logprobs"]).any()
    assert moved == objective.loss.gradient_without_advantage


@pytest.mark.parametrize("name", RECIPES)
def test_docstrings_name_every_constant_and_explanations_every_term(name):
    recipe = getattr(rl_fn.recipes, name)
    objective, doc = recipe(), inspect.getdoc(recipe) or ""
    assert objective.name == name
    described = [line.split(":")[0].strip() for line in doc.split("Args:\n")[-1].split("\n\n")[0].splitlines()]
    assert [x for x in inspect.signature(recipe).parameters if x not in described] == []
    text = OBJECTIVES[name].explain()
    assert text.startswith(f"{objective.name}: minimise ") and "0.1·kl" in text and "0.01·H" in text
    assert ("\n  w =" in text) == (OBJECTIVES[name].correction is not None)
