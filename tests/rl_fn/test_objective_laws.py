"""Laws of objectives: weight 0, who is left out, what is counted, shapes, what is not declared, traced constants."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn import components as c
from tests.rl_fn.component_table import ADVANTAGES, LOSSES
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.recipe_batches import advantages, batch, loss_alone, mapped, rollouts, run
from tests.rl_fn.registry import RECIPES

PLAIN = {name: getattr(rl_fn.recipes, name)() for name in RECIPES}
LOSS_OF = {loss_alone(objective): name for name, objective in PLAIN.items()}


def dropped_first(b: rl_fn.Batch) -> jax.Array:
    """Weight 0 on the first column, as a rejection of its tokens."""
    return jnp.ones_like(b.logprobs).at[:, 0].set(0.0)


DROP = c.Custom(dropped_first)


@pytest.mark.parametrize("name", LOSSES)
def test_what_has_weight_zero_is_not_in_the_loss(name):
    """Whatever is not finite there, the loss and its gradient are the same, and finite."""
    mode = "seq-mean-token-mean" if "seq-mean-token-mean" in LOSSES[name].modes else "seq-mean-token-sum"
    objective = rl_fn.recipes.reinforce().replace(loss=LOSSES[name], correction=DROP, aggregation=c.Aggregation(mode))
    of = batch(rl_fn.recipes.reinforce(), 1)._replace(values=None)
    assert of.mask[:, 0].any()
    outcomes = []
    for field in ("old_logprobs", "logprobs", "rollout_logprobs", "advantages"):
        for junk in (-np.inf, np.inf, np.nan):
            first = np.arange(of.mask.shape[1]) == 0
            dirty = of._replace(**{field: np.where(first, junk, getattr(of, field)).astype(np.float32)})
            outcome = run(objective, dirty)
            leaves = [outcome.loss, outcome.gradient["logprobs"]]
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(leaves)), (field, junk)
            outcomes.append((field, leaves))
    for field in ("old_logprobs", "logprobs"):
        first, *others = [leaves for name, leaves in outcomes if name == field]
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, first, other)
    assert np.asarray(outcomes[0][1][1]).any()


def test_a_rejection_rejects_what_is_not_finite():
    objective = rl_fn.recipes.dapo().replace(correction=c.Rejection(2.0))
    of = batch(rl_fn.recipes.dapo(), 1)
    excluded = of._replace(old_logprobs=of.old_logprobs.copy())
    place = tuple(np.argwhere(of.mask & (of.advantages < 0))[0])
    excluded.old_logprobs[place] = -np.inf
    outcome = run(objective, excluded)
    assert np.isfinite(outcome.value) and np.isfinite(outcome.gradient["logprobs"]).all()
    assert outcome.gradient["logprobs"][place] == 0 and np.asarray(outcome.gradient["logprobs"]).any()
    # Without the rejection it is seen.
    assert not np.isfinite(run(rl_fn.recipes.dapo(), excluded).value)


def test_the_share_of_a_sum_is_not_divided():
    """The denominator of token-sum is 0: value and gradient are those of the sum."""
    objective = rl_fn.recipes.dapo().replace(aggregation=c.Aggregation("token-sum"))
    of = mapped(jnp.asarray, batch(rl_fn.recipes.dapo(), 2))
    count = objective.denominator(of.mask)
    assert count == 0
    whole, gradient = jax.value_and_grad(lambda x: objective(of._replace(logprobs=x))[0])(of.logprobs)
    share, of_share = jax.value_and_grad(lambda x: objective.share(of._replace(logprobs=x), count)[0])(of.logprobs)
    assert share == whole and np.isfinite(whole)
    np.testing.assert_array_equal(of_share, gradient)
    assert np.asarray(gradient).any()


@pytest.mark.parametrize("field", [name for name in rl_fn.Batch._fields if name not in ("mask", "segment_ids")])
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (8,), ()])
def test_a_field_that_would_broadcast_is_refused(field, shape):
    of = batch(rl_fn.recipes.vapo(), 3)._replace(values=np.ones((8, 8), np.float32))
    value = np.ones(shape, bool if field == "correct" else np.float32)
    with pytest.raises(ValueError, match="must have the shape of mask"):
        rl_fn.recipes.vapo()(of._replace(**{field: value}))


def test_raw_rewards_are_float32():
    rewards = jnp.array([[1.0, 0.1]], jnp.bfloat16)
    objective = rl_fn.recipes.reinforce(baseline=0.003)
    got = objective.advantages(rl_fn.Rollouts(rewards, jnp.ones((1, 2, 1), bool))).advantages
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[..., 0], rewards.astype(jnp.float32) - 0.003, rtol=1e-6)


def completions(read: rl_fn.Rollouts, shape: str, chosen: slice) -> rl_fn.Rollouts:
    """The rollouts of some completions of each group."""
    out = {}
    for name, x in read._asdict().items():
        whole = x is None or name == "greedy_rewards"
        axis = 2 if name == "rewards" and shape == "*batch R G" else 1
        out[name] = x if whole else np.moveaxis(np.moveaxis(x, axis, 0)[chosen], 0, axis)
    return rl_fn.Rollouts(**out)


# What compares the rewards of a group and nothing else: OPO's lengths are weights, REINFORCE++ averages over tokens.
COMPARES = ("GRPO", "RLOO", "GPG", "MaxRL", "GRPOPassK", "GDPO")


@pytest.mark.parametrize("component", [ADVANTAGES[f"{name}Advantage"] for name in COMPARES] + [c.PassKAdvantage(2)])
def test_a_completion_without_tokens_counts_with_its_reward_unless_it_is_not_valid(component):
    objective = rl_fn.recipes.grpo().replace(advantage=component)
    read = rollouts(objective, 6)
    rewards = np.array([[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 2.0]], np.float32)
    if component.rewards_shape == "*batch R G":
        rewards = np.stack([rewards, rewards], 1)
    mask = read.mask.copy()
    mask[:, 3] = False
    full = advantages(objective, read._replace(rewards=rewards, mask=np.ones_like(mask)))
    counts = advantages(objective, read._replace(rewards=rewards, mask=mask))
    without = advantages(objective, read._replace(rewards=rewards, mask=mask, valid=mask.any(-1)))
    np.testing.assert_allclose(counts, np.where(mask, full, 0.0), rtol=1e-6)
    alone = completions(read._replace(rewards=rewards, mask=mask), component.rewards_shape, slice(0, 3))
    np.testing.assert_allclose(without[:, :3], advantages(objective, alone), rtol=1e-5, atol=1e-6)
    assert not np.allclose(counts, without)


@pytest.mark.parametrize("objective", LOSS_OF, ids=list(LOSS_OF.values()))
def test_rows_that_are_not_computed_have_no_loss_and_no_gradient(objective):
    """Rows left out by `selection` add nothing to the total: the denominator, which counts them, is all they do."""
    whole = batch(PLAIN[LOSS_OF[objective]], 7)
    flat = np.arange(len(whole.mask)) % 2 == 0
    of = whole._replace(advantages=np.where(flat[:, None], 0.0, whole.advantages).astype(np.float32))
    read = rl_fn.Rollouts(np.arange(8.0, dtype=np.float32)[None], of.mask[None])
    selected = objective.selection(read, of.advantages[None])
    np.testing.assert_array_equal(selected.mask[0], of.mask)
    rows = np.asarray(selected.rows[0])
    all_rows = objective.over_batch or objective.gradient_without_advantage
    np.testing.assert_array_equal(rows, of.mask.any(-1) & (all_rows | (of.advantages != 0).any(-1)))
    one, other = run(objective, of), run(objective, of._replace(mask=of.mask & rows[:, None]))
    np.testing.assert_allclose(one.loss.total, other.loss.total, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(one.gradient["logprobs"], other.gradient["logprobs"], rtol=2e-5, atol=1e-6)


def test_dynamic_sampling_is_the_objectives_and_dapo_has_it():
    assert [name for name in RECIPES if PLAIN[name].dynamic_sampling is not None] == ["dapo"]
    rewards = np.array([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.5]], np.float32)
    read = rl_fn.Rollouts(rewards, np.ones((4, 2, 3), bool))

    def kept(objective, of=read):
        given = objective.advantages(of).advantages
        selected = objective.selection(of, given)
        assert not (np.asarray(selected.rows) & ~np.asarray(selected.mask).any(-1)).any()
        return np.asarray(selected.mask).any((1, 2)).tolist(), np.asarray(selected.rows).any(1).tolist()

    # Groups of equal rewards are not trained on; DAPO does not count them, GRPO's loss does.
    assert kept(rl_fn.recipes.dapo()) == ([True, False, False, True],) * 2
    without = rl_fn.recipes.dapo().replace(dynamic_sampling=None)
    assert kept(without) == ([True] * 4, [True, False, False, True])
    assert kept(rl_fn.recipes.grpo()) == ([True] * 4,) * 2
    bounded = rl_fn.recipes.dapo().replace(dynamic_sampling=c.DynamicSampling(low=0.0, high=0.9))
    assert kept(bounded) == ([False, False, False, True],) * 2
    # A KL term has a gradient wherever a group is kept.
    with_kl = rl_fn.recipes.dapo().replace(kl=c.KL("k3", 0.1))
    assert kept(with_kl) == ([True, False, False, True],) * 2
    failed = read._replace(valid=np.array([[True, False]] * 4))
    assert kept(rl_fn.recipes.dapo(), failed) == ([False] * 4,) * 2


def test_a_plain_function_loses_no_row_and_is_not_cut():
    of = batch(rl_fn.recipes.dapo(), 8)
    objective = rl_fn.recipes.dapo().replace(loss=lambda b: -b.logprobs)
    assert objective.gradient_without_advantage and objective.over_batch and not objective.accepts_packed
    read = rl_fn.Rollouts(np.arange(8.0, dtype=np.float32)[None], of.mask[None])
    rows = objective.selection(read, np.zeros_like(of.mask, np.float32)[None]).rows
    np.testing.assert_array_equal(rows[0], of.mask.any(-1))
    packed = of._replace(segment_ids=np.zeros(of.mask.shape, np.int32))
    with pytest.raises(ValueError, match="does not take packed rows"):
        objective(packed)
    declared = objective.replace(loss=c.Custom(lambda b: -b.logprobs, accepts_packed=True, over_batch=False))
    assert not declared.over_batch and np.isfinite(declared(packed)[0])
    by_rewards = rl_fn.recipes.grpo().replace(advantage=lambda r: r - 1.0)
    with pytest.raises(ValueError, match=r"does not take Rollouts\.valid"):
        by_rewards.advantages(read._replace(valid=of.mask.any(-1)[None]))


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_of_a_recipe_may_be_traced(name):
    """CORE-12: also the coefficient of a term that a known 0 leaves out."""
    recipe = getattr(rl_fn.recipes, name)
    of = mapped(jnp.asarray, batch(recipe(), 9))
    signature = inspect.signature(recipe).parameters.values()
    constants = {p.name: jnp.float32(p.default) for p in signature if type(p.default) is float}
    traced = jax.eval_shape(lambda numbers: recipe(**numbers)(of)[0], constants)
    assert traced.shape == ()
    zeros = dict.fromkeys(constants.keys() & {"kl_coef", "positive_coef"}, 0.0)
    reads = [set(recipe(**coefs).required_batch_fields) for coefs in (zeros, dict.fromkeys(zeros, 0.5))]
    assert reads[0] < reads[1] or not zeros, "a known 0 needs no field of its term"


def test_constants_may_be_traced_and_differentiated():
    """An annealed clip, KL coefficient and cap are arrays inside jit; the numbers are those of Python's constants."""
    of = mapped(jnp.asarray, batch(rl_fn.recipes.dapo(), 9))

    def loss(high, beta, cap):
        objective = rl_fn.recipes.dapo(clip_high=high).replace(kl=c.KL("k3", beta), correction=c.TIS(cap))
        assert "(traced)" in objective.explain() or not isinstance(high, jax.core.Tracer)
        return objective(of)[0]

    constants = (0.3, 0.1, 1.05)
    traced = quick_jit(loss)(*map(jnp.float32, constants))
    np.testing.assert_allclose(traced, loss(*constants), rtol=1e-6)
    by_beta = quick_jit(jax.grad(loss, argnums=1))(*map(jnp.float32, constants))
    np.testing.assert_allclose(by_beta, rl_fn.recipes.dapo()(of)[1]["kl"], rtol=1e-5)

    def estimate(gamma, lam):
        read = rollouts(rl_fn.recipes.ppo(), 9)
        return rl_fn.recipes.ppo(gamma=gamma, lam=lam).advantages(read).advantages

    np.testing.assert_allclose(
        quick_jit(estimate)(jnp.float32(0.9), jnp.float32(0.8)), estimate(0.9, 0.8), rtol=2e-5, atol=2e-6
    )


def test_the_same_constants_are_the_same_objective():
    """Static constants hash and compare by value, functions too."""
    one, other = (rl_fn.recipes.dapo().replace(loss=c.Custom(dropped_first)) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != one.replace(loss=c.Custom(dropped_first, over_batch=False))
    assert dataclasses.replace(PLAIN["dapo"], loss=dropped_first).loss == c.Custom(dropped_first)
