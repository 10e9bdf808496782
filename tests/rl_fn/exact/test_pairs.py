"""Preference losses and reward models on numbers where they are powers, logarithms of 2, or 0."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.preference_losses.dpo import _slope

LOG2 = math.log(2.0)
ZERO = jnp.zeros(1)


def pair(chosen, rejected):
    """Arguments with these log-ratios to the reference."""
    return jnp.array([chosen]) - 3.0, jnp.array([rejected]) - 2.0, ZERO - 3.0, ZERO - 2.0


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Log-ratios 2 and −1.
ROWS = {
    "dpo": ({"beta": 0.5}, -math.log(sigmoid(1.5))),
    "dpo smoothed": ({"beta": 0.5, "label_smoothing": 0.25}, -math.log(sigmoid(1.5)) + 0.25 * 1.5),
    # (−(1 − ε) log σ + ε log σ(−z))/(1 − 2ε) = softplus(−z) − ε/(1 − 2ε) z, ε/(1 − 2ε) = ½.
    "dpo_robust": ({"beta": 0.5, "label_smoothing": 0.25}, -math.log(sigmoid(1.5)) - 0.5 * 1.5),
    "ipo": ({"beta": 0.25}, (3.0 - 2.0) ** 2),
    "hinge": ({"beta": 0.25}, 0.25),
    "hinge far": ({"beta": 1.0}, 0.0),
    "sppo": ({"beta": 0.25}, (2.0 - 2.0) ** 2 + (-1.0 + 2.0) ** 2),
    "nca": ({"beta": 1.0}, -math.log(sigmoid(2)) - 0.5 * math.log(sigmoid(-2)) - 0.5 * math.log(sigmoid(1))),
    "bco": ({"beta": 1.0, "delta": 0.5}, -math.log(sigmoid(1.5)) - math.log(sigmoid(1.5))),
    "apo_zero": ({"beta": 1.0}, 1 - sigmoid(2) + sigmoid(-1)),
    "apo_down": ({"beta": 1.0}, sigmoid(2) + 1 - sigmoid(3)),
    "f_dpo": ({"beta": 0.5}, -math.log(sigmoid(1.5))),
    "f_dpo forward": ({"beta": 1.0, "divergence": "forward_kl"}, -math.log(sigmoid(math.e - math.exp(-2)))),
    # log(2u/(1 + u)) without the log 2 that cancels: log σ(2) − log σ(−1).
    "f_dpo js": ({"beta": 1.0, "divergence": "js"}, -math.log(sigmoid(math.log(sigmoid(2) / sigmoid(-1))))),
    # (1 − u^−½)/½: 2(1 − e⁻¹) − 2(1 − e^½).
    "f_dpo alpha": (
        {"beta": 1.0, "divergence": "alpha", "alpha": 0.5},
        -math.log(sigmoid(2 * (math.exp(0.5) - math.exp(-1)))),
    ),
    "f_dpo alpha 0": ({"beta": 0.5, "divergence": "alpha", "alpha": 0.0}, -math.log(sigmoid(1.5))),
    "f_dpo alpha 1": (
        {"beta": 1.0, "divergence": "alpha", "alpha": 1},
        -math.log(sigmoid(math.e - math.exp(-2))),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_loss_by_hand(row):
    options, expected = ROWS[row]
    np.testing.assert_allclose(
        getattr(rl_fn, row.split()[0])(*pair(2.0, -1.0), **options), [expected], rtol=2e-5, atol=1e-7
    )


def test_exo_between_the_smoothed_preference_and_the_model():
    # z = log 3: σ = ¾; ¾ log(¾/(1 − ε)) + ¼ log(¼/ε) with ε = ¼ is 0, with ε = 0.1 it is not.
    z = math.log(3.0)
    np.testing.assert_allclose(rl_fn.exo(*pair(z, 0.0), beta=1.0, label_smoothing=0.25), [0.0], atol=1e-6)
    expected = 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)
    np.testing.assert_allclose(rl_fn.exo(*pair(z, 0.0), beta=1.0, label_smoothing=0.1), [expected], rtol=1e-5)


def test_discopop_at_zero_and_beyond():
    # At z = 0 both halves are ½: ½ log 2 + ½.
    np.testing.assert_allclose(rl_fn.discopop(*pair(0.0, 0.0)), [0.5 * LOG2 + 0.5], rtol=1e-6)
    # z = 1, τ = 1: (1 − σ(1))·softplus(−1) + σ(1)e⁻¹.
    expected = (1 - sigmoid(1)) * -math.log(sigmoid(1)) + sigmoid(1) * math.exp(-1)
    np.testing.assert_allclose(rl_fn.discopop(*pair(1.0, 0.0), beta=1.0, tau=1.0), [expected], rtol=1e-6)


def test_lengths_divide():
    got = rl_fn.dpo_norm(*pair(2.0, -1.0), jnp.array([4]), jnp.array([2]), beta=1.0)
    np.testing.assert_allclose(got, [-math.log(sigmoid(1.0))], rtol=1e-6)  # 2/4 + 1/2
    got = rl_fn.rpo(*pair(2.0, -1.0), jnp.array([4]), beta=0.5, alpha=2.0)
    np.testing.assert_allclose(got, [-math.log(sigmoid(1.5)) + 2 * 1.0 / 4], rtol=1e-6)  # log π = −1


def test_losses_without_a_reference():
    c, r, gold = jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([-0.5])
    np.testing.assert_allclose(rl_fn.simpo(c, r, beta=0.5, gamma=0.25), [-math.log(sigmoid(0.75))], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.cpo(c, r, beta=0.5, alpha=2.0), [-math.log(sigmoid(1.0)) + 2.0], rtol=1e-6)
    np.testing.assert_allclose(
        rl_fn.tpo(c, r, gold, beta=0.5, alpha=2.0, gamma=0.25), [-math.log(sigmoid(0.75)) + 1.0], rtol=1e-6
    )
    # Odds of ½ and ¼: 1 and ⅓, so the log of the ratio is log 3 and softplus(−log 3) = log(4/3).
    c, r = jnp.array([-LOG2]), jnp.array([-2 * LOG2])
    np.testing.assert_allclose(rl_fn.orpo(c, r, lam=2.0), [2 * math.log(4 / 3) + LOG2], rtol=1e-6)
    # Near probability 1 the odds are 1/(−x): log(1e-3/2e-3) to a thousandth.
    near = rl_fn.orpo(jnp.array([-1e-3]), jnp.array([-2e-3]), lam=1.0)
    odds = math.log(math.expm1(2e-3) / math.expm1(1e-3))
    np.testing.assert_allclose(near, [-math.log(sigmoid(odds)) + 1e-3], rtol=1e-5)


@pytest.mark.parametrize("x", [-1.0, -0.5, -0.49, -0.01])
def test_log_odds_slope_on_both_sides_of_the_switch(x):
    # d/dx [x − log(1 − eˣ)] = 1/(1 − eˣ); with r at log ½ (odds 1) the loss is softplus(−odds) − x.
    odds = x - math.log(-math.expm1(x))
    slope = jax.grad(lambda c: rl_fn.orpo(c, jnp.array([-LOG2]), lam=1.0).sum())(jnp.array([x]))
    np.testing.assert_allclose(slope, [-sigmoid(-odds) / -math.expm1(x) - 1.0], rtol=1e-5)


def test_transport_sorts_before_it_subtracts():
    # Margins 3, 1 against reference margins 0, 2 sorted: 3 − 2 and 1 − 0, both 1.
    chosen, rejected = jnp.array([3.0, 1.0]) - 9.0, jnp.zeros(2) - 9.0
    ref_chosen, ref_rejected = jnp.array([0.0, 2.0]) - 9.0, jnp.zeros(2) - 9.0
    got = rl_fn.aot(chosen, rejected, ref_chosen, ref_rejected, beta=1.0)
    np.testing.assert_allclose(got, [-math.log(sigmoid(1.0))] * 2, rtol=1e-6)
    # Unpaired: chosen ratios 3, 1 against rejected ratios −1, 0 sorted: 3 − 0, 1 + 1.
    got = rl_fn.aot_unpaired(chosen, jnp.array([-1.0, 0.0]), jnp.zeros(2) - 9.0, jnp.zeros(2), beta=1.0)
    np.testing.assert_allclose(got, [-math.log(sigmoid(3.0)), -math.log(sigmoid(2.0))], rtol=1e-6)


def test_kto_weighs_the_two_kinds():
    x, ref, good = jnp.array([-1.0, -1.0]), jnp.array([-3.0, -2.0]), jnp.array([True, False])
    got = rl_fn.kto(x, ref, good, 0.5, beta=1.0, desirable_weight=2.0, undesirable_weight=3.0)
    # 2 − ½ and 1 − ½.
    np.testing.assert_allclose(got, [2 * (1 - sigmoid(1.5)), 3 * sigmoid(0.5)], rtol=1e-6)
    assert float(rl_fn.kto_kl(x, ref)) == 1.5
    assert float(rl_fn.kto_kl(ref, x)) == 0.0
    assert float(rl_fn.kto_kl(x, ref, jnp.array([True, False]))) == 2.0
    assert float(rl_fn.kto_kl(x, ref, jnp.array([False, False]))) == 0.0


def test_wpo_is_a_geometric_mean():
    logprobs, mask = jnp.log(jnp.array([[0.5, 0.125, 0.3]])), jnp.array([[True, True, False]])
    np.testing.assert_allclose(rl_fn.wpo_weights(logprobs, mask), [0.25], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.wpo_weights(logprobs[0], mask[0]), 0.25, rtol=1e-6)
    assert rl_fn.wpo_weights(logprobs, mask & False).tolist() == [0.0]
    # Each over its Σπ²: ½/¼ and ⅛/¼.
    got = rl_fn.wpo_weights(logprobs, mask, sum_squared_probs=jnp.full((1, 3), 0.25))
    np.testing.assert_allclose(got, [1.0], rtol=1e-6)


def test_reward_models():
    got = rl_fn.bradley_terry(jnp.array([2.0]), jnp.array([1.0]), margin=0.5, center=0.25)
    np.testing.assert_allclose(got, [-math.log(sigmoid(0.5)) + 0.25 * 9.0], rtol=1e-6)
    # Worths 1, 2, 1 in this order: 1/4 · 2/3 · 1; without the first 2/3.
    r = jnp.log(jnp.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(rl_fn.plackett_luce(r), math.log(6.0), rtol=1e-6)
    np.testing.assert_allclose(rl_fn.plackett_luce(r, jnp.array([False, True, True])), math.log(1.5), rtol=1e-6)
    metrics = rl_fn.preference_metrics(*pair(2.0, -1.0), beta=0.5)
    assert [part.tolist() for part in metrics] == [[1.0], [-0.5], [1.5], [1.0]]
    # A tie is not right.
    assert rl_fn.preference_metrics(*pair(1.0, 1.0)).accuracy.tolist() == [0.0]


def test_a_masked_pair_is_nothing_in_value_and_gradient():
    mask, bad = jnp.array([True, False]), jnp.array([1.0, math.nan])
    for name in (
        "dpo",
        "dpo_robust",
        "ipo",
        "hinge",
        "sppo",
        "nca",
        "bco",
        "apo_zero",
        "apo_down",
        "exo",
        "discopop",
        "f_dpo",
        "aot",
    ):
        loss = getattr(rl_fn, name)

        def total(*x, loss=loss):
            return loss(*x, mask).sum()

        value, slopes = jax.value_and_grad(total, argnums=(0, 1, 2, 3))(bad, bad - 1.0, bad - 2.0, bad - 3.0)
        assert np.isfinite(value) and all(np.isfinite(s).all() and s[1] == 0 for s in slopes), name


def test_a_masked_pair_of_orpo_makes_no_nan_on_the_way():
    """Who looks for NaN with jax.debug_nans finds none of ours: the odds of a masked pair are those of a number."""
    chosen, rejected, mask = jnp.array([-0.5, 0.0]), jnp.array([-1.0, 0.0]), jnp.array([True, False])
    with jax.debug_nans(True):
        gradient = jax.grad(lambda x: rl_fn.orpo(x, rejected, mask).sum())(chosen)
    assert gradient[0] < 0 and gradient[1] == 0


def test_the_slope_of_alpha_near_zero_is_that_of_its_limit():
    with jax.enable_x64(True):
        for alpha in (0.009, 0.011):
            found = _slope(jnp.array([1.0, -1.0]), "alpha", jnp.array(alpha))
            np.testing.assert_allclose(found, -np.expm1([-alpha, alpha]) / alpha, rtol=1e-13)
    found = _slope(jnp.array([jnp.inf, 2.0]), "alpha", jnp.array(0.0))
    assert found.tolist() == [math.inf, 2.0]


def test_preference_metrics_have_no_gradient():
    def total(*arrays):
        # Uneven: the rejected reward is in one of them with each sign.
        return sum(i * jnp.sum(x) for i, x in enumerate(rl_fn.preference_metrics(*arrays, beta=0.5)))

    assert not any(x.any() for x in jax.grad(total, (0, 1, 2, 3))(*pair(2.0, -1.0)))
