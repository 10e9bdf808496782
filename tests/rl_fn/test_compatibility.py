"""Any component in any slot: the objective works, or it is refused with the reason and the remedy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.aggregation import MODES
from tests.rl_fn.component_table import ADVANTAGES, CORRECTIONS, ICEPOP, LOSSES, TIS
from tests.rl_fn.recipe_batches import COLUMNS, OBJECTIVES, advantages, batch, rollouts
from tests.rl_fn.registry import RECIPES

GSPO, GAE = rl_fn.components.GSPO(), rl_fn.components.GAE()
KL = rl_fn.components.KL("k1", 0.1)


AGGREGATIONS = [
    rl_fn.components.Aggregation(mode, 16.0 if mode == "seq-mean-token-sum-norm" else None) for mode in MODES
]


@pytest.mark.parametrize(
    ("make", "reason", "remedy"),
    [
        (lambda: rl_fn.recipes.decoupled_ppo().replace(correction=TIS), "count it twice", "correction=None"),
        (lambda: rl_fn.recipes.vespo().replace(correction=ICEPOP), "count it twice", "behaviour='old'"),
        (lambda: rl_fn.recipes.topr().replace(correction=TIS), "count it twice", "behaviour='old'"),
        (lambda: rl_fn.recipes.dppo().replace(correction=TIS), "count it twice", "behaviour='old'"),
        (lambda: rl_fn.components.Product((TIS, ICEPOP)), "counted once", "keep one"),
        (
            lambda: rl_fn.recipes.decoupled_ppo().replace(
                correction=rl_fn.components.Product((rl_fn.components.M2POMask(), TIS))
            ),
            "count it twice",
            "PPOClip for DecoupledPPO",
        ),
        (lambda: rl_fn.recipes.dapo().replace(loss=GSPO), "whole sequence", "GSPOToken"),
        (lambda: rl_fn.recipes.dapo().replace(loss=rl_fn.components.GMPO()), "whole sequence", "seq-mean-token-mean"),
        (
            lambda: rl_fn.recipes.luspo().replace(aggregation=rl_fn.components.Aggregation("seq-mean-token-sum")),
            "whole sequence",
            "seq-mean-token-mean",
        ),
        (
            lambda: rl_fn.recipes.kimi().replace(aggregation=rl_fn.components.Aggregation("token-mean")),
            "whole sequence",
            "level='token'",
        ),
        (lambda: rl_fn.recipes.gspo().replace(advantage=GAE), "its own advantage", "GSPOToken"),
        (
            lambda: rl_fn.recipes.gspo().replace(advantage=rl_fn.components.DistillationAdvantage()),
            "its own advantage",
            "GSPOToken",
        ),
        (
            lambda: rl_fn.recipes.gspo().replace(
                advantage=rl_fn.components.ReinforcePPAdvantage(), reward_kl=rl_fn.components.KL("k1", 0.1)
            ),
            "its own advantage",
            "GSPOToken",
        ),
        (lambda: rl_fn.recipes.rloo().replace(kl=KL, reward_kl=KL), "penalises it twice", "reward_kl=None"),
        (lambda: rl_fn.recipes.ppo().replace(kl=KL, reward_kl=KL), "penalises it twice", "kl=None"),
        (
            lambda: rl_fn.recipes.maxrl().replace(reward_kl=rl_fn.components.KL("k1", 0.1)),
            "cannot hold a KL",
            "reward_kl=None",
        ),
        (
            lambda: rl_fn.recipes.gdpo().replace(reward_kl=rl_fn.components.KL("k1", 0.1)),
            "cannot hold a KL",
            "into the loss",
        ),
        (
            lambda: rl_fn.recipes.gigpo().replace(reward_kl=rl_fn.components.KL("k1", 0.1)),
            "cannot hold a KL",
            "into the loss",
        ),
        (
            lambda: rl_fn.recipes.ppo().replace(advantage=rl_fn.components.GRPOAdvantage()),
            "trains a critic",
            "value=None",
        ),
        (lambda: rl_fn.recipes.grpo().replace(value=rl_fn.components.ValueLoss()), "trains a critic", "GAE"),
        (lambda: rl_fn.components.Aggregation("seq-mean-token-sum-norm"), "max_completion_length", "generation budget"),
        (lambda: rl_fn.components.PPOClip(dual_clip=1.0), "dual_clip", "must exceed 1"),
        (lambda: rl_fn.components.GSPO(dual_clip=0.5), "dual_clip", "must exceed 1"),
        (
            lambda: rl_fn.recipes.gigpo().replace(dynamic_sampling=rl_fn.components.DynamicSampling()),
            "one reward a completion",
            "dynamic_sampling=None",
        ),
    ],
)
def test_the_impossible_is_refused_when_it_is_made(make, reason, remedy):
    with pytest.raises(ValueError, match=reason) as refused:
        make()
    assert remedy in str(refused.value)


def test_the_same_pieces_apart_are_accepted():
    assert rl_fn.recipes.vespo(behaviour="old").replace(correction=TIS).required_batch_fields == ("rollout_logprobs",)
    assert rl_fn.recipes.dppo(behaviour="old").required_batch_fields == ()
    assert rl_fn.recipes.dapo().replace(correction=TIS, loss=rl_fn.components.GSPOToken()).correction == TIS
    assert rl_fn.recipes.ppo().replace(
        advantage=rl_fn.components.GRPOAdvantage(), value=None
    ).required_rollout_fields == ("rewards",)
    assert rl_fn.recipes.kimi(level="token").replace(aggregation=rl_fn.components.Aggregation("token-mean"))
    assert rl_fn.recipes.m2po().replace(correction=rl_fn.components.Product((rl_fn.components.M2POMask(), TIS)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_field_that_the_batch_lacks_is_named(name):
    objective = OBJECTIVES[name]
    of = batch(objective, 1)
    assert {"ref_logprobs", "entropies"} <= set(objective.required_batch_fields)
    for field in objective.required_batch_fields:
        with pytest.raises(ValueError, match=f"{objective.name} has .* needs batch.{field}; it is None"):
            objective(of._replace(**{field: None}))


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_advantages_lack_is_named(name):
    objective = getattr(rl_fn.recipes, name)()
    read = rollouts(objective, 1)
    for field in objective.required_rollout_fields:
        with pytest.raises(ValueError, match=f"{objective.name} has advantage=.* which needs Rollouts.{field}"):
            objective.advantages(read._replace(**{field: None}))
    assert (
        (objective.advantages(read).returns is not None) == objective.advantage.critic == (objective.value is not None)
    )
    missing = (
        "value=ValueLoss.* needs batch.values" if objective.value else "has no critic's loss: give value=ValueLoss"
    )
    with pytest.raises(ValueError, match=missing):
        objective.value_parts(batch(objective, 1)._replace(values=None))


def test_a_penalty_in_the_reward_needs_its_log_probabilities():
    read = rl_fn.Rollouts(np.ones((1, 2), np.float32), np.ones((1, 2, 3), bool))
    for objective in (rl_fn.recipes.rloo(), rl_fn.recipes.ppo()):
        penalised = objective.replace(reward_kl=KL)
        with pytest.raises(ValueError, match=r"needs Rollouts\.(values|old_logprobs)"):
            penalised.advantages(read)
        with pytest.raises(ValueError, match="give old_logprobs and ref_logprobs"):
            penalised.token_rewards(read)


def test_rewards_of_another_shape_are_refused():
    mask = np.ones((3, 4, 2), bool)
    with pytest.raises(ValueError, match=r"needs rewards \(\*batch, R, G\)"):
        rl_fn.recipes.gdpo().advantages(rl_fn.Rollouts(np.ones(4, np.float32), mask[0]))
    with pytest.raises(ValueError, match=r"weights .* for 2 rewards"):
        read = rl_fn.Rollouts(np.ones((3, 2, 4), np.float32), mask)
        rl_fn.recipes.gdpo(weights=(1.0, 2.0, 3.0)).advantages(read)
    with pytest.raises(ValueError, match="one sequence a row"):
        zeros = np.zeros((1, 4), np.float32)
        read = rl_fn.Rollouts(
            None, zeros == 0, token_rewards=zeros, values=zeros, segment_ids=np.zeros((1, 4), np.int32)
        )
        rl_fn.recipes.vapo().advantages(read)
    with pytest.raises(ValueError, match="one number for each row of the mask must have shape"):
        rl_fn.recipes.grpo().advantages(rl_fn.Rollouts(np.ones(4, np.float32), mask))


def test_a_penalty_in_the_reward_is_taken_off_once():
    half = rl_fn.components.KL("k1", 0.5)
    objective = rl_fn.recipes.rloo().replace(reward_kl=half)
    read = rollouts(objective, 2)
    d = np.where(read.mask, read.old_logprobs - read.ref_logprobs, 0.0)
    expected = advantages(rl_fn.recipes.rloo(), read._replace(rewards=read.rewards - 0.5 * d.sum(-1)))
    np.testing.assert_allclose(advantages(objective, read), expected, rtol=1e-5, atol=1e-5)
    with_critic = rl_fn.recipes.ppo().replace(reward_kl=half)
    rewards = np.asarray(with_critic.token_rewards(read))
    some = read.mask.any(-1)
    np.testing.assert_allclose(
        rewards.sum(-1), np.where(some, read.rewards, 0.0) - 0.5 * d.sum(-1), rtol=1e-5, atol=1e-5
    )
    given = rl_fn.recipes.ppo().advantages(read._replace(token_rewards=rewards))
    np.testing.assert_allclose(with_critic.advantages(read).advantages, given.advantages, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="give no penalties"):
        objective.advantages(read._replace(penalties=d))


def test_the_critic_has_its_loss():
    objective = rl_fn.recipes.ppo().replace(value=rl_fn.components.ValueLoss(0.5))
    of = batch(objective, 3)
    draw = np.random.default_rng(3).normal(size=(3, *of.mask.shape)).astype(np.float32)
    of = of._replace(values=draw[0], old_values=draw[1], returns=draw[2])
    loss, metrics = objective.value_parts(of)
    expected = np.maximum((draw[0] - draw[2]) ** 2, (np.clip(draw[0], draw[1] - 0.5, draw[1] + 0.5) - draw[2]) ** 2)
    np.testing.assert_allclose(loss.value(), expected[of.mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"].value(), expected[of.mask].mean(), rtol=1e-5)
    plain = rl_fn.recipes.ppo().value_parts(of._replace(old_values=None))[0]
    np.testing.assert_allclose(plain.value(), ((draw[0] - draw[2]) ** 2)[of.mask].mean(), rtol=1e-5)
    gradient = jax.grad(lambda v: rl_fn.recipes.ppo().value_parts(of._replace(values=v))[0].value())(
        jnp.asarray(draw[0])
    )
    np.testing.assert_allclose(
        gradient, np.where(of.mask, 2 * (draw[0] - draw[2]) / of.mask.sum(), 0.0), rtol=1e-5, atol=1e-7
    )


@pytest.fixture(scope="module")
def full() -> rl_fn.Batch:
    return batch(rl_fn.recipes.dapo(), 4)._replace(values=None)


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_with_every_aggregation_and_correction_works_or_is_refused(loss, full):
    """Shapes only, which is what an objective that cannot work fails at; numbers are the recipes' laws."""
    plain = rl_fn.recipes.reinforce()
    worked = 0
    for aggregation, (name, correction) in itertools.product(AGGREGATIONS, CORRECTIONS.items()):
        try:
            objective = plain.replace(loss=LOSSES[loss], aggregation=aggregation, correction=correction)
        except ValueError as refused:
            assert ": drop the correction" in str(refused) or ": aggregate by one of" in str(refused)
            continue
        worked += 1
        # The correction multiplies whatever the aggregation is: one of the six is enough.
        if name == "none" or aggregation.mode == "seq-mean-token-mean":
            shaped = (
                full
                if aggregation.mode != "prompt-mean"
                else rl_fn.Batch(*(x if x is None else x.reshape(2, 4, COLUMNS) for x in full))
            )
            total, metrics = jax.eval_shape(objective, shaped)
            assert total.shape == () and all(metric.shape == () for metric in metrics.values())
    assert worked >= len(CORRECTIONS) - 2


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_goes_with_every_loss_of_a_token(name):
    objective = rl_fn.recipes.dapo().replace(advantage=ADVANTAGES[name], dynamic_sampling=None)
    of = batch(objective, 5)
    assert np.isfinite(objective(of)[0])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: rl_fn.components.DecoupledPPO(clip_low=-1.0),
        lambda: rl_fn.components.DecoupledPPO(weight_cap=0.0),
        lambda: rl_fn.components.CISPO(clip_high=-1.0),
        lambda: rl_fn.components.SAPO(tau_pos=0.0),
        lambda: rl_fn.components.DPPO(threshold=0.0),
        lambda: rl_fn.components.DPPO(behaviour="new"),
        lambda: rl_fn.components.DRO(beta=0.0),
        lambda: rl_fn.components.Kimi(level="word"),
        lambda: rl_fn.components.TOPR("word"),
        lambda: rl_fn.components.GMPO(clip_low=-0.1),
        lambda: rl_fn.components.LUSPO(dual_clip=1.0),
        lambda: rl_fn.components.VESPO(k_pos=-1.0),
        lambda: rl_fn.components.ClipCov(fraction=2.0),
        lambda: rl_fn.components.ClipCov(cov_low=5.0),
        lambda: rl_fn.components.KLCov(coef=-1.0),
        lambda: rl_fn.components.PositiveExample(-0.1),
        lambda: rl_fn.components.Sum(()),
        lambda: rl_fn.components.Product(()),
        lambda: rl_fn.components.Rejection(0.0),
        lambda: rl_fn.components.Rejection(0.1, level="word"),
        lambda: rl_fn.components.M2POMask(0.0),
        lambda: rl_fn.components.VACOMask(-0.1),
        lambda: rl_fn.components.HighEntropyMask(1.5),
        lambda: rl_fn.components.ValueLoss(clip=0.0),
        lambda: rl_fn.components.ReinforcePPAdvantage(gamma=1.5),
        lambda: rl_fn.components.GiGPOAdvantage(scale="batch"),
        lambda: rl_fn.components.LengthAdaptiveGAE(alpha=0.0),
        lambda: rl_fn.components.DistillationAdvantage(clip=0.0),
        lambda: rl_fn.components.GPGAdvantage(alpha="all"),
        lambda: rl_fn.components.PassKAdvantage(0),
        lambda: rl_fn.components.GRPOAdvantage(eps=-1.0),
    ],
)
def test_bad_constants_are_refused_at_once(bad):
    with pytest.raises(ValueError, match=r"must|need"):
        bad()
