"""What distillation losses promise: their limits, their gradients by enumeration, a teacher that reports little."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from rl_fn.distillation import _log_total
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)
BETAS = [0.0, 0.3, 0.5, 1.0]
TAILS = ["bucket", "renormalise", "drop"]
V = 6


def _logits(seed, *shape):
    d = Draw(seed)
    return jnp.asarray(d.normal(*shape, V, scale=2.0)), jnp.asarray(d.normal(*shape, V, scale=2.0))


@functools.cache
def _gkd(beta):
    return quick_jit(functools.partial(rl_fn.gkd, beta=beta))


@functools.cache
def _top_k(beta, tail):
    return quick_jit(functools.partial(rl_fn.top_k_distillation, beta=beta, tail=tail))


IDS = jnp.array([0, 1, -1], jnp.int32)


@functools.cache
def _slopes(beta, tail):
    def losses(student, reported, ids):
        return rl_fn.top_k_distillation(student, reported, ids, beta=beta, tail=tail)

    return quick_jit(lambda s, *of: (losses(s, *of), jax.grad(lambda s: losses(s, *of).sum())(s)))


@given(seed=SEEDS)
def test_the_ends_are_the_two_kls(seed):
    student, teacher = _logits(seed, 3)
    np.testing.assert_allclose(
        _gkd(0.0)(student, teacher), rl_fn.kl_categorical(teacher, student), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        _gkd(1.0)(student, teacher), rl_fn.kl_categorical(student, teacher), rtol=1e-5, atol=1e-6
    )


def test_between_the_ends_it_tends_to_a_kl_only_when_divided():
    with jax.enable_x64(True):
        student, teacher = (x.astype(jnp.float64) for x in _logits(3))
        near = [float(rl_fn.gkd(student, teacher, beta=beta)) for beta in (1e-8, 1 - 1e-8)]
        np.testing.assert_allclose(near, 0.0, atol=1e-4)
        np.testing.assert_allclose(near[0] / 1e-8, rl_fn.kl_categorical(teacher, student), rtol=1e-3)
        np.testing.assert_allclose(near[1] / 1e-8, rl_fn.kl_categorical(student, teacher), rtol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
@given(seed=SEEDS)
def test_exchanging_the_two_is_one_minus_beta(beta, seed):
    student, teacher = _logits(seed, 3)
    value = np.asarray(_gkd(beta)(student, teacher))
    np.testing.assert_allclose(value, _gkd(1 - beta)(teacher, student), rtol=1e-4, atol=1e-6)
    assert (value >= -1e-6).all()
    if 0 < beta < 1:
        assert (value <= -beta * np.log(beta) - (1 - beta) * np.log(1 - beta) + 1e-6).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_like_its_teacher_has_nothing_to_learn(beta):
    student, _ = _logits(0, 3)
    value, slope = jax.value_and_grad(lambda x: rl_fn.gkd(x, student, beta=beta).sum())(student)
    np.testing.assert_allclose(value, 0.0, atol=2e-6)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)


def test_temperature_divides_both_logits():
    student, teacher = _logits(1, 3)
    np.testing.assert_allclose(
        rl_fn.gkd(student, teacher, temperature=2.0), rl_fn.gkd(student / 2, teacher / 2), rtol=1e-6
    )


@pytest.mark.parametrize("beta", [0.3, 0.5])
def test_truncated_distributions_have_finite_mixtures(beta):
    student, teacher = jnp.array([0.0, 1.0, -jnp.inf]), jnp.array([0.5, -jnp.inf, 1.0])
    value, slopes = jax.value_and_grad(lambda s, t: rl_fn.gkd(s, t, beta=beta), argnums=(0, 1))(student, teacher)
    assert np.isfinite(value) and np.isfinite(slopes).all()
    apart = rl_fn.gkd(jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0]), beta=beta)
    np.testing.assert_allclose(apart, -beta * np.log(beta) - (1 - beta) * np.log(1 - beta), rtol=1e-6)
    assert float(rl_fn.gkd(student, teacher, beta=0.0)) == np.inf
    inside = jnp.array([0.5, -jnp.inf, -jnp.inf])
    value, slope = jax.value_and_grad(lambda s: rl_fn.gkd(s, inside, beta=0.0))(student)
    assert np.isfinite(value) and np.isfinite(slope).all()


@pytest.mark.parametrize(("beta", "tail"), [(0.0, "bucket"), (0.3, "drop"), (0.3, "bucket"), (1.0, "renormalise")])
def test_masked_rows_do_not_reach_value_or_gradient(beta, tail):
    student, teacher = _logits(5, 2)
    mask = jnp.array([True, False])
    bad = jnp.where(mask[:, None], student, jnp.nan)
    reported = jax.nn.log_softmax(teacher)[:, :3]
    ids = jnp.array([[4, 0, 2], [99, -7, 99]], jnp.int32)

    def losses(s):
        spoiled = jnp.where(mask[:, None], reported, jnp.inf)
        sparse = rl_fn.top_k_distillation(s, spoiled, ids, mask, beta=beta, tail=tail)
        return rl_fn.gkd(s, jnp.where(mask[:, None], teacher, -jnp.inf), mask, beta=beta) + sparse

    value, slope = quick_jit(lambda s: (losses(s), jax.grad(lambda s: losses(s).sum())(s)))(bad)
    alone = _gkd(beta)(student, teacher)[0] + _top_k(beta, tail)(student[:1], reported[:1], ids[:1])[0]
    np.testing.assert_allclose(value, [alone, 0.0], rtol=1e-6)
    assert np.isfinite(slope).all() and not np.asarray(slope[1]).any() and np.asarray(slope[0]).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
@given(seed=SEEDS)
def test_a_teacher_that_reports_all_is_gkd_in_any_order(beta, tail, seed):
    student, teacher = _logits(seed, 3)
    ids = jnp.asarray(np.argsort(Draw(seed).uniform(0, 1, 3, V), axis=-1).astype(np.int32))
    reported = jnp.take_along_axis(jax.nn.log_softmax(teacher), ids, axis=-1)
    got = _top_k(beta, tail)(student, reported, ids)
    np.testing.assert_allclose(got, _gkd(beta)(student, teacher), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("confidence", [0.0, 20.0, 25.0])
@pytest.mark.parametrize("beta", BETAS)
@given(seed=SEEDS)
def test_a_bucket_hides_but_never_invents(beta, confidence, seed):
    """Of a confident teacher rounding hides the rest, which the student still reaches."""
    student, teacher = _logits(seed, 3)
    teacher = teacher.at[:, 0].add(confidence)
    ids = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (3, 3))
    reported = jax.nn.log_softmax(teacher)[:, :3]
    bucket = np.asarray(_top_k(beta, "bucket")(student, reported, ids))
    whole = np.asarray(_gkd(beta)(student, teacher))
    # 1 less the reported probabilities is right to some float epsilons alone.
    slack = 1e-5 if confidence == 0 or beta < 1 else 0.05
    assert np.isfinite(bucket).all() and (bucket >= -2e-6).all() and (bucket <= whole + 1e-5 + slack * whole).all()
    slopes = np.asarray(_slopes(beta, "bucket")(student, reported, ids)[1])
    assert np.isfinite(slopes).all() and (np.abs(slopes).max(-1) > 1e-6 * whole).all()
    moved = student.at[:, 3:].add(1.0)
    plain, shifted = (_top_k(beta, "renormalise")(x, reported, ids) for x in (student, moved))
    np.testing.assert_allclose(plain, shifted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_certain_teacher_and_entries_that_are_not_there(tail, beta):
    student = jnp.array([0.0, 1.0, -1.0, 0.5])
    ids = jnp.array([2, 0], jnp.int32)
    value, slope = jax.value_and_grad(
        lambda s: rl_fn.top_k_distillation(s, jnp.array([0.0, -jnp.inf]), ids, beta=beta, tail=tail)
    )(student)
    assert np.isfinite(value) and np.isfinite(slope).all()
    if beta == 0:
        p = jax.nn.softmax(student)
        expected = -jnp.log(p[2] / (p[0] + p[2])) if tail == "renormalise" else -jnp.log(p[2])
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
def test_padding_of_a_report_reserves_no_token(beta, tail):
    """Two of four equal entries are reported, and padding: student and teacher are the same."""
    half = jnp.log(jnp.array([0.25, 0.25, 0.25]))
    for padded in (half, half.at[2].set(-jnp.inf), half.at[2].set(jnp.nan)):
        value, slope = _slopes(beta, tail)(jnp.zeros(4), padded, IDS)
        np.testing.assert_allclose(value, 0.0, atol=1e-6)
        if tail != "drop":  # what is dropped is no divergence: its least value is elsewhere
            np.testing.assert_allclose(slope, 0.0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
@given(seed=st.integers(0, 9))
def test_a_padded_report_is_the_shorter_report(beta, tail, seed):
    """Wherever the padding stands, up to a row of V entries; of nothing reported nothing is learned."""
    student, teacher = _logits(seed, 3)
    order = np.argsort(Draw(seed).uniform(0, 1, 3, V), axis=-1).astype(np.int32)
    reported = jnp.take_along_axis(jax.nn.log_softmax(teacher), jnp.asarray(order), axis=-1)
    for count in (0, 2, V - 1):
        left = np.random.default_rng(seed).permutation(V)[:count]
        ids = np.full_like(order, -1)
        ids[:, left] = order[:, left]
        got = _slopes(beta, tail)(student, reported, jnp.asarray(ids))
        if not count:
            expected = (jnp.zeros(3), jnp.zeros_like(student))
        else:
            expected = _slopes(beta, tail)(student, reported[:, left], jnp.asarray(order[:, left]))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_the_bucket_teaches_the_entries_that_are_not_reported():
    student = jnp.array([0.0, 1.0, -1.0, 0.5])
    reported, ids = jnp.log(jnp.array([0.6, 0.3])), jnp.array([2, 0], jnp.int32)
    slope = jax.grad(lambda s: rl_fn.top_k_distillation(s, reported, ids))(student)
    p = jax.nn.softmax(student)
    # Cross-entropy to (0.3, ·, 0.6, ·) with 0.1 shared between the others as the student shares it.
    others = 0.1 * p / (p[1] + p[3])
    target = jnp.array([0.3, others[1], 0.6, others[3]])
    np.testing.assert_allclose(slope, p - target, rtol=1e-4, atol=1e-6)


@quick_jit
def _on_policy(student, teacher):
    p, reported = jax.nn.softmax(student), jax.nn.log_softmax(teacher)
    slope = jax.grad(lambda z: jnp.sum(p * rl_fn.on_policy_distillation(jax.nn.log_softmax(z), reported)))(student)
    mean = jnp.sum(p * rl_fn.distillation_advantages(jax.nn.log_softmax(student), reported))
    kl, expected = jax.value_and_grad(lambda z: rl_fn.kl_categorical(z, teacher))(student)
    return slope, expected, mean, kl


@given(seed=SEEDS)
def test_on_policy_loss_has_the_reverse_kl_gradient(seed):
    """Σ π(a) ∇loss(a) = ∇KL(π‖π_T) over all tokens, and the advantages' mean is −KL."""
    slope, expected, mean, kl = _on_policy(*_logits(seed))
    np.testing.assert_allclose(slope, expected, atol=2e-5)
    np.testing.assert_allclose(-mean, kl, rtol=1e-4, atol=1e-6)


def test_advantages_have_no_gradient_and_a_bound_if_asked():
    new, teacher = jnp.array([-1.0, -1.0, -5.0]), jnp.array([-jnp.inf, -1.5, -1.0])
    assert rl_fn.distillation_advantages(new, teacher, clip=2.0).tolist() == [-2.0, -0.5, 2.0]
    slope = jax.grad(lambda x: rl_fn.distillation_advantages(x, x - 1.0).sum())(new)
    assert not np.asarray(slope).any()
    by_logprobs, by_teacher = jax.grad(lambda x, t: rl_fn.on_policy_distillation(x, t, clip=2.0).sum(), argnums=(0, 1))(
        new, teacher
    )
    assert by_logprobs.tolist() == [2.0, 0.5, -2.0]
    assert not np.asarray(by_teacher).any()


def test_what_is_undefined_raises():
    x, ids = jnp.zeros(3), jnp.arange(3, dtype=jnp.int32)
    with pytest.raises(ValueError, match="beta"):
        rl_fn.gkd(x, x, beta=1.5)
    with pytest.raises(ValueError, match="temperature"):
        rl_fn.gkd(x, x, temperature=0.0)
    with pytest.raises(ValueError, match="beta"):
        rl_fn.top_k_distillation(x, x, ids, beta=-0.1)
    with pytest.raises(ValueError, match="entries"):
        rl_fn.top_k_distillation(x[:2], x, ids)
    with pytest.raises(ValueError, match="clip"):
        rl_fn.distillation_advantages(x, x, clip=0.0)


def test_the_total_of_probabilities_far_apart():
    assert _log_total(jnp.array([-200.0, 0.0])).tolist() == [0.0]
    assert _log_total(jnp.array([-jnp.inf, 0.0])).tolist() == [0.0]
    assert _log_total(jnp.full(2, -jnp.inf)).tolist() == [-jnp.inf]
