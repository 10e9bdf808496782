"""Identities between preference losses, what their papers promise, and what happens far out."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)
N = 9
LENGTHS = np.arange(1, N + 1, dtype=np.int32)
F_DPO = {
    f"f_dpo {x}": functools.partial(rl_fn.f_dpo, divergence=x) for x in ("reverse_kl", "forward_kl", "js", "alpha")
}
# Of (chosen, rejected, ref_chosen, ref_rejected).
ON_DELTA = {
    "dpo": rl_fn.dpo,
    "cdpo": functools.partial(rl_fn.dpo, label_smoothing=0.2),
    "dpo_robust": rl_fn.dpo_robust,
    "dpo_norm": lambda c, r, ref_c, ref_r: rl_fn.dpo_norm(
        c, r, ref_c, ref_r, jnp.asarray(LENGTHS), jnp.asarray(LENGTHS)
    ),
    "ipo": rl_fn.ipo,
    "hinge": rl_fn.hinge,
    "discopop": rl_fn.discopop,
    "discopop wide": functools.partial(rl_fn.discopop, tau=2.0),
    "exo": rl_fn.exo,
    "nca": rl_fn.nca,
    "bco": rl_fn.bco,
    "sppo": rl_fn.sppo,
    "apo_zero": rl_fn.apo_zero,
    "apo_down": rl_fn.apo_down,
    "aot": rl_fn.aot,
    "aot_unpaired": rl_fn.aot_unpaired,
    **F_DPO,
}
# Of (chosen, rejected), the reference left out.
FREE = {
    "orpo": rl_fn.orpo,
    "simpo": rl_fn.simpo,
    "cpo": rl_fn.cpo,
    "tpo": lambda c, r, **k: rl_fn.tpo(c, r, c, **k),
    "bradley_terry": rl_fn.bradley_terry,
}
# Chosen up and rejected down, whatever the log-ratios: cDPO, IPO, SPPO and NCA have an optimum, EXO and DiscoPOP are
# flat or turn, APO-down lowers both.
MONOTONE = ["dpo", "dpo_robust", "dpo_norm", "bco", "apo_zero", "aot", "aot_unpaired", *F_DPO]


@functools.cache
def _compiled(name):
    return quick_jit(lambda *pairs: {**ON_DELTA, **FREE}[name](*pairs))


@functools.cache
def _slopes(name, count):
    loss = {**ON_DELTA, **FREE}[name]
    return quick_jit(jax.grad(lambda *pairs: loss(*pairs).sum(), argnums=tuple(range(count))))


def _four(seed, scale=3.0):
    d = Draw(seed)
    return tuple(jnp.asarray(-np.abs(d.normal(N, scale=scale))) for _ in range(4))


@given(seed=SEEDS, smoothing=st.sampled_from([0.0, 0.1, 0.4]))
def test_cdpo_is_the_expected_loss_under_flipped_labels_and_robust_dpo_undoes_it(seed, smoothing):
    c, r, ref_c, ref_r = _four(seed)
    kept, flipped = rl_fn.dpo(c, r, ref_c, ref_r), rl_fn.dpo(r, c, ref_r, ref_c)
    smoothed = rl_fn.dpo(c, r, ref_c, ref_r, label_smoothing=smoothing)
    np.testing.assert_allclose(smoothed, (1 - smoothing) * kept + smoothing * flipped, rtol=1e-5, atol=1e-6)
    one, other = (rl_fn.dpo_robust(*x, label_smoothing=smoothing) for x in ((c, r, ref_c, ref_r), (r, c, ref_r, ref_c)))
    np.testing.assert_allclose((1 - smoothing) * one + smoothing * other, kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept - flipped, -0.1 * ((c - ref_c) - (r - ref_r)), rtol=1e-4, atol=1e-6)
    if smoothing == 0:
        np.testing.assert_array_equal(smoothed, kept)
        np.testing.assert_array_equal(one, kept)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "dpo_robust", "dpo_norm", "aot_unpaired", *F_DPO])
def test_equal_policies_lose_log_two(name):
    c, _, r, _ = _four(0)
    np.testing.assert_allclose(_compiled(name)(c, r, c, r), np.full(N, np.log(2)), rtol=1e-6)


@pytest.mark.parametrize("name", [*MONOTONE, "hinge", *FREE])
@given(seed=SEEDS)
def test_chosen_rises_and_rejected_falls(name, seed):
    pairs = _four(seed, scale=1.0)[: 2 if name in FREE else 4]
    up, down = _slopes(name, len(pairs))(*pairs)[:2]
    assert (up < 0).all() if name in MONOTONE else (up <= 0).all()
    assert (down > 0).all() if name in MONOTONE else (down >= 0).all()


@pytest.mark.parametrize("name", list(ON_DELTA))
@given(seed=SEEDS, shift=st.sampled_from([-8.0, 4.0, 16.0]))
def test_a_constant_in_policy_and_reference_cancels(name, seed, shift):
    c, r, ref_c, ref_r = (jnp.round(x * 1024) / 1024 for x in _four(seed))  # exact after the shift
    before, after = _compiled(name)(c, r, ref_c, ref_r), _compiled(name)(c + shift, r, ref_c + shift, ref_r)
    np.testing.assert_allclose(after, before, rtol=1e-6)


@pytest.mark.parametrize("size", [100.0, 1000.0])
@pytest.mark.parametrize("name", [*ON_DELTA, *FREE])
def test_far_log_ratios_are_finite(name, size):
    corners = jnp.array(list(itertools.product([-size, 0.0, size], repeat=2))).T
    pairs = (*corners, jnp.zeros(N), jnp.zeros(N)) if name in ON_DELTA else tuple(jnp.minimum(corners, 0.0))
    for x in (_compiled(name)(*pairs), *_slopes(name, len(pairs))(*pairs)):
        assert np.isfinite(x).all()


F_DPO_ALPHA = {x: quick_jit(functools.partial(rl_fn.f_dpo, divergence="alpha", alpha=x)) for x in (0.0, 1e-3, 1.0)}


@given(seed=SEEDS)
def test_f_dpo_has_dpo_as_its_first_and_forward_kl_as_its_last(seed):
    pairs = _four(seed, scale=1.0)
    dpo = _compiled("dpo")(*pairs)
    np.testing.assert_array_equal(_compiled("f_dpo reverse_kl")(*pairs), dpo)
    np.testing.assert_array_equal(F_DPO_ALPHA[0.0](*pairs), dpo)
    np.testing.assert_allclose(F_DPO_ALPHA[1e-3](*pairs), dpo, atol=2e-3)
    np.testing.assert_allclose(F_DPO_ALPHA[1.0](*pairs), _compiled("f_dpo forward_kl")(*pairs), rtol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_ipo_stops_at_its_target(beta):
    zero, target = jnp.zeros(1), jnp.full(1, 0.5 / beta)
    value, slope = jax.value_and_grad(lambda x: rl_fn.ipo(x, zero, zero, zero, beta=beta).sum())(target)
    assert float(value) == 0 and float(slope[0]) == 0
    around = rl_fn.ipo(jnp.concatenate([target - 0.5, target + 0.5]), *(jnp.zeros(2),) * 3, beta=beta)
    np.testing.assert_allclose(around, [0.25, 0.25], rtol=1e-5)


def test_optima_of_exo_sppo_and_nca():
    zero = jnp.zeros(1)
    logit = jnp.log(jnp.full(1, 0.8 / 0.2))
    exo = functools.partial(rl_fn.exo, beta=1.0, label_smoothing=0.2)
    np.testing.assert_allclose(exo(logit, zero, zero, zero), 0.0, atol=1e-7)
    np.testing.assert_allclose(jax.grad(lambda x: exo(x, zero, zero, zero).sum())(logit), 0.0, atol=1e-7)
    assert float(rl_fn.sppo(zero + 5, zero - 5, zero, zero, beta=0.1)[0]) == 0
    assert (
        float(rl_fn.sppo(zero + 2, zero - 1, zero, zero, beta=0.1, chosen_win_rate=0.7, rejected_win_rate=0.4)[0])
        < 1e-9
    )
    # The preferred response is held at σ(r) = 2/3: r = log 2.
    nca = jax.grad(lambda x: rl_fn.nca(x, zero, zero, zero, beta=1.0).sum())(jnp.log(jnp.full(1, 2.0)))
    np.testing.assert_allclose(nca, 0.0, atol=1e-7)


def test_discopop_is_logistic_on_the_left_and_exponential_on_the_right():
    zero = jnp.zeros(2)
    z = jnp.array([-3.0, 3.0])
    got = rl_fn.discopop(z, zero, zero, zero, beta=1.0)
    np.testing.assert_allclose(got, [np.log1p(np.exp(3.0)), np.exp(-3.0)], rtol=1e-5)


@given(seed=SEEDS)
def test_bco_ignores_a_shift_of_rewards_that_delta_has_too(seed):
    c, r, ref_c, ref_r = _four(seed)
    plain = rl_fn.bco(c, r, ref_c, ref_r, beta=0.5, delta=0.25)
    moved = rl_fn.bco(c + 2, r + 2, ref_c, ref_r, beta=0.5, delta=1.25)
    np.testing.assert_allclose(moved, plain, rtol=1e-5)
    slope = jax.grad(lambda x: rl_fn.bco(c, r, ref_c, ref_r, delta=x).sum())(jnp.float32(0.3))
    assert float(slope) == 0


@given(seed=SEEDS)
def test_transport_looks_at_distributions_not_at_pairs(seed):
    c, r, ref_c, ref_r = _four(seed)
    order = np.random.default_rng(seed).permutation(N)
    for name, moved in (
        ("aot", (c, r, ref_c[order], ref_r[order])),
        ("aot_unpaired", (c, r[order], ref_c, ref_r[order])),
    ):
        np.testing.assert_allclose(_compiled(name)(*moved), _compiled(name)(c, r, ref_c, ref_r), rtol=1e-6)
    zero = jnp.zeros(N)
    np.testing.assert_allclose(_compiled("aot")(c, r, c[order], r[order]), np.full(N, np.log(2)), rtol=1e-6)
    # In order of rank, both are DPO.
    up = jnp.sort(c)
    dpo = _compiled("dpo")(up, jnp.sort(r), zero, zero)
    np.testing.assert_allclose(_compiled("aot_unpaired")(up, jnp.sort(r), zero, zero), dpo, rtol=1e-6)


@quick_jit
def _with_a_flat_reference(c, r, gold):
    """Pairs of losses that must agree, the right one by DPO at β = 2."""
    zero, one, lengths = jnp.zeros(N), jnp.ones(N), jnp.asarray(LENGTHS)
    dpo = rl_fn.dpo(c, r, zero, zero, beta=2.0)
    return [
        (rl_fn.simpo(c, r, gamma=0.0), dpo),
        (rl_fn.dpo_norm(c, r, zero, zero, one, one, beta=2.0), dpo),
        (rl_fn.cpo(c, r, beta=2.0, alpha=0.0), dpo),
        (rl_fn.cpo(c, r, beta=2.0), dpo - c),
        (rl_fn.tpo(c, r, gold, beta=2.0), dpo - gold),
        (rl_fn.tpo(c, r, gold, beta=2.0, alpha=0.0, gamma=1.0), rl_fn.simpo(c, r)),
        (rl_fn.rpo(c, r, zero, zero, lengths, beta=2.0, alpha=0.5), dpo - 0.5 * c / lengths.astype(c.dtype)),
        (rl_fn.rpo(c, r, zero, zero, lengths * 0, beta=2.0), dpo),
        (rl_fn.bradley_terry(2 * c, 2 * r), dpo),
        (rl_fn.bradley_terry(2 * c, 2 * r, margin=1.0), rl_fn.simpo(c, r)),
    ]


@given(seed=SEEDS)
def test_losses_without_a_reference_are_those_with_a_flat_one(seed):
    for got, expected in _with_a_flat_reference(*_four(seed)[:3]):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def _orpo_against_unlikely():
    far = jnp.full(1, -50.0)  # odds e⁻⁵⁰: the loss is then a straight line in the log-odds
    return quick_jit(jax.value_and_grad(lambda r: rl_fn.orpo(far, r, lam=1.0).sum()))


@given(exponent=st.floats(-37.0, 0.5))
def test_odds_keep_their_digits_as_the_likelihood_nears_one(exponent):
    x = np.float32(-(10.0**exponent))
    value, slope = _orpo_against_unlikely()(jnp.full(1, x))
    wide = np.float64(x)
    log_odds = wide - np.log(-np.expm1(wide))
    np.testing.assert_allclose(float(value) - 50.0, log_odds + 50.0, rtol=1e-5)
    np.testing.assert_allclose(float(slope[0]), -1 / np.expm1(wide), rtol=1e-5)


@pytest.mark.parametrize("side", [0, 1])
def test_a_likelihood_of_one_has_finite_odds(side):
    pair = [jnp.full(1, -1.0), jnp.full(1, -1.0)]
    pair[side] = jnp.zeros(1)
    value, slopes = jax.value_and_grad(lambda c, r: rl_fn.orpo(c, r).sum(), argnums=(0, 1))(*pair)
    assert np.isfinite(value) and np.isfinite(slopes).all()
    if side == 1:
        log_odds = [-1 - np.log1p(-np.exp(-1)), -np.log(np.finfo(np.float32).tiny)]
        np.testing.assert_allclose(value, 1 + 0.1 * (log_odds[1] - log_odds[0]), rtol=1e-5)


@quick_jit
def _kto(new, ref, good):
    def total(x, z):
        return rl_fn.kto(x, ref, good, z).sum()

    kl = rl_fn.kto_kl(new, ref)
    slopes = jax.grad(total, argnums=(0, 1))(new, kl)
    through = jax.grad(lambda x: total(x, rl_fn.kto_kl(x, ref)))(new)
    at_point = rl_fn.kto(ref + 0.5, ref, good, 0.5, desirable_weight=2.0, undesirable_weight=3.0)
    ends = rl_fn.kto(ref + 1e3, ref, good, 0.0), rl_fn.kto(ref - 1e3, ref, good, 0.0)
    return kl, slopes, through, at_point, ends


@given(seed=SEEDS)
def test_kto_saturates_around_a_point_without_gradient(seed):
    d = Draw(seed)
    new, ref, good = d.logprobs(N), d.logprobs(N), d.allowed_tokens(N)
    kl, (by_logprobs, by_kl), through, at_point, (above, below) = _kto(new, ref, good)
    assert float(by_kl) == 0
    assert (np.asarray(by_logprobs) * np.where(good, -1, 1) > 0).all()
    np.testing.assert_allclose(through, by_logprobs, rtol=1e-6)
    np.testing.assert_allclose(at_point, np.where(good, 1.0, 1.5), rtol=1e-5)
    np.testing.assert_allclose(kl, max(0.0, (new - ref).mean()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(above, np.where(good, 0.0, 1.0), atol=1e-6)
    np.testing.assert_allclose(below, np.where(good, 1.0, 0.0), atol=1e-6)


@given(seed=SEEDS)
def test_aligned_weight_of_a_flat_policy_is_one(seed):
    sizes = jnp.asarray(Draw(seed).integers(50, 2, 6, low=1).astype(np.float32))
    mask = jnp.array([[True] * 6, [True, False] * 3])
    logprobs = jnp.where(mask, -jnp.log(sizes), jnp.nan)
    np.testing.assert_allclose(rl_fn.wpo_weights(logprobs, mask, sum_squared_probs=1 / sizes), [1.0, 1.0], rtol=1e-5)
    slope = jax.grad(lambda x: rl_fn.wpo_weights(x, mask).sum())(logprobs)
    assert not np.asarray(slope).any()


def test_masked_margins_and_shifts_are_harmless():
    mask, bad = jnp.array([True, False]), jnp.array([0.5, jnp.nan])
    zero = jnp.zeros(2)
    calls = (
        lambda x: rl_fn.bradley_terry(x, zero, mask, margin=bad),
        lambda x: rl_fn.bco(x, zero, zero, zero, mask, delta=bad),
        lambda x: rl_fn.kto(x, zero, mask, bad, mask),
        lambda x: rl_fn.sppo(x, zero, zero, zero, mask, chosen_win_rate=bad, rejected_win_rate=bad),
    )
    for call in calls:
        value, slope = jax.value_and_grad(lambda x, call=call: call(x).sum())(bad)
        assert np.isfinite(value) and np.isfinite(slope).all() and float(slope[1]) == 0


def _wrong():
    four = (jnp.zeros(1),) * 4
    for loss in (rl_fn.dpo, rl_fn.ipo, rl_fn.hinge, rl_fn.exo, rl_fn.nca, rl_fn.bco, rl_fn.sppo, rl_fn.discopop):
        yield loss, four, {"beta": 0.0}
    for loss in (rl_fn.aot, rl_fn.aot_unpaired, rl_fn.apo_zero, rl_fn.apo_down, rl_fn.preference_metrics):
        yield loss, four, {"beta": -1.0}
    for loss in (rl_fn.dpo, rl_fn.dpo_robust, rl_fn.f_dpo, rl_fn.exo, rl_fn.aot):
        yield loss, four, {"label_smoothing": 0.5}
    yield rl_fn.exo, four, {"label_smoothing": 0.0}
    yield rl_fn.discopop, four, {"tau": 0.0}
    yield rl_fn.f_dpo, four, {"alpha": 1.5}
    yield rl_fn.rpo, (*four, four[0]), {"alpha": -1.0}
    yield rl_fn.orpo, four[:2], {"lam": -0.1}
    yield rl_fn.cpo, four[:2], {"alpha": -0.1}
    yield rl_fn.tpo, four[:3], {"alpha": -0.1}
    yield rl_fn.bradley_terry, four[:2], {"center": -1.0}
    yield rl_fn.kto, (*four[:2], jnp.ones(1, bool), 0.0), {"desirable_weight": -1.0}


@pytest.mark.parametrize(("loss", "args", "kwargs"), list(_wrong()))
def test_what_is_undefined_raises(loss, args, kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs)).split("_")[-1]):
        loss(*args, **kwargs)
