"""The losses, weights and KL terms of the dialects in float64 NumPy, on a batch that reaches every branch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import Aggregation, EntropyBonus, RawReward, Reinforce
from rl_fn.objectives.dialects.dialect_losses import (
    Gated,
    ImportanceBand,
    RatioClip,
    TokenLoss,
    capped_reinforce,
    trusted_reinforce,
)
from rl_fn.objectives.dialects.dialect_terms import AllRows, BoundedKL, OverWidth
from rl_fn.objectives.dialects.trl import EntropyGate, OffPolicyGate, OverHighEntropy, SequenceSapo, Vespo
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses.token_level import sapo
from tests.oracle.lookup import ORACLE
from tests.rl_fn.exact.dialect_batch import (
    BATCH,
    MASK,
    NEW,
    OLD,
    REF,
    ROLLOUT,
    A,
    D,
    H,
    clip,
    close,
    gradient,
    per_sequence,
)


def test_the_batch_reaches_every_branch():
    for log_ratio in (D, per_sequence(D)):
        assert (np.exp(log_ratio) > 1.3)[MASK].any() and (np.exp(log_ratio) < 0.8)[MASK].any()
    assert ((np.exp(D) > 3) & (A < 0) & MASK).any()


def test_the_clip_on_a_ratio_of_each_level():
    close(RatioClip(0.1, 0.3, 1.5)(BATCH), clip(D, 0.1, 0.3, 1.5))
    close(RatioClip(0.1, 0.3, limit=0.2)(BATCH), clip(np.clip(D, -0.2, 0.2), 0.1, 0.3))
    close(RatioClip(0.1, 2.0, cap=0.25)(BATCH), clip(np.minimum(D, 0.25), 0.1, 2.0))
    close(RatioClip(0.1, 0.3, behaviour="rollout")(BATCH), clip(NEW - ROLLOUT, 0.1, 0.3))
    held = per_sequence(np.clip(D, -0.5, 0.5))
    for level in ("sequence", "sequence-token"):
        close(RatioClip(0.01, 0.02, level=level, limit=0.5)(BATCH), clip(held, 0.01, 0.02))
    with pytest.raises(ValueError, match="rollout_logprobs; it is None"):
        RatioClip(behaviour="rollout")(BATCH._replace(rollout_logprobs=None))
    cut = np.where(A > 0, np.exp(D) > 1.3, np.exp(D) < 0.9)
    np.testing.assert_array_equal(RatioClip(0.1, 0.3).clipped(BATCH), cut & MASK)


def test_where_the_gradient_of_a_ratio_goes():
    """Without a clip −ρA: to the token, to the sequence's tokens in equal parts, or to the token at the mean ratio."""
    wide: Any = {"clip_low": 1.0, "clip_high": 1e6}
    close(gradient(RatioClip(**wide)), -np.exp(D) * A)
    ratio = np.exp(per_sequence(D))
    close(gradient(RatioClip(**wide, level="sequence")), -ratio * per_sequence(A))
    close(gradient(RatioClip(**wide, level="sequence-token")), -ratio * A)
    close(gradient(RatioClip(**wide, limit=0.5)), np.where(np.abs(D) < 0.5, -np.exp(D) * A, 0.0))


def test_a_function_with_constants():
    constants = (("tau_pos", 0.7), ("tau_neg", 1.3))
    close(TokenLoss(sapo, constants)(BATCH), ORACLE["sapo"](NEW, OLD, A, MASK, **dict(constants)))
    held = np.clip(D, -0.3, 0.3)
    close(TokenLoss(sapo, constants, limit=0.3)(BATCH), ORACLE["sapo"](held, 0 * D, A, MASK, **dict(constants)))
    close(SequenceSapo(constants, "token")(BATCH), ORACLE["sapo"](NEW, OLD, A, MASK, **dict(constants)))
    close(
        SequenceSapo(constants, "sequence")(BATCH), ORACLE["sapo"](per_sequence(D), 0 * D, A, MASK, **dict(constants))
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_capped_ratio_on_reinforce(level):
    arrays = (BATCH.logprobs, BATCH.old_logprobs, BATCH.advantages, BATCH.mask)
    weight = np.minimum(np.exp(D if level == "token" else per_sequence(D)), 1.2)
    close(capped_reinforce(*arrays, cap=1.2, level=level), -weight * A * NEW)
    close(gradient(TokenLoss(capped_reinforce, (("cap", 1.2), ("level", level)))), -weight * A)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_trust_region_with_two_thresholds(divergence):
    p, q = np.exp(NEW), np.exp(OLD)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    distance = np.abs(p - q) if divergence == "tv" else kl
    outside = np.where(A > 0, (p > q) & (distance > 0.1), (p < q) & (distance > 0.2))
    weight = np.where(outside, 0.0, np.minimum(p / q, 1.5))
    constants = (("low", 0.2), ("high", 0.1), ("ratio_cap", 1.5), ("divergence", divergence))
    component = TokenLoss(trusted_reinforce, constants)
    assert set(outside[MASK & (A > 0)]) == set(outside[MASK & (A < 0)]) == {True, False}
    close(component(BATCH), -weight * A * NEW, rtol=1e-4)
    close(gradient(component), -weight * A, rtol=1e-4)
    # With an advantage of 0 nothing is learnt; a probability of 1 is not the logarithm of 0.
    sure = BATCH._replace(logprobs=jnp.zeros_like(BATCH.logprobs), advantages=jnp.ones_like(BATCH.advantages))
    assert np.isfinite(gradient(component, sure)).all()


def test_a_token_on_the_threshold_is_inside():
    old, new, one = jnp.zeros((1, 1)), jnp.full((1, 1), -0.7), jnp.ones((1, 1))
    distance = float(jnp.exp(old)[0, 0] - jnp.exp(new)[0, 0])
    for p, q, a in ((new, old, -one), (old, new, one)):
        for limit, weight in ((distance, True), (distance * 0.999, False)):
            got = jax.grad(
                lambda x, q=q, a=a, limit=limit: trusted_reinforce(
                    x, q, a, one > 0, low=limit, high=limit, ratio_cap=9.0, divergence="tv"
                )[0, 0]
            )(p)
            assert bool(got[0, 0] != 0) == weight


def test_a_sure_token_is_at_a_finite_distance():
    """1 − p + 1e-8 for p = 1: KL = ½ log ½ + ½ log(½/1e-8) = 8.52."""
    one = jnp.ones((1, 1))
    for high, weight in ((8.5, 0.0), (8.55, 2.0)):
        got = jax.grad(
            lambda x, high=high: trusted_reinforce(
                x, jnp.log(one / 2), one, one > 0, low=1.0, high=high, ratio_cap=9.0, divergence="kl"
            )[0, 0]
        )(one * 0.0)
        np.testing.assert_allclose(got, -weight, rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum"])
def test_a_band_of_importance_weights(level):
    token = np.where(MASK, OLD - ROLLOUT, 0.0)
    at = {"token": token, "sequence": per_sequence(token), "sequence_sum": per_sequence(token, total=True)}[level]
    ratio = np.exp(at)
    for mode, expected in (("clip", np.clip(ratio, 0.8, 1.5)), ("mask", ratio * ((ratio >= 0.8) & (ratio <= 1.5)))):
        got = ImportanceBand(0.8, 1.5, mode, level)(BATCH)
        assert not np.asarray(got)[~MASK].any()
        close(got, expected)
    close(ImportanceBand(level=level, limit=0.1)(BATCH), np.exp(np.clip(at, -0.1, 0.1)))
    kept = (ratio >= 0.8) & (ratio <= 1.5)
    close(ImportanceBand(0.8, 1.5, "mask", level, keep_tokens=True)(BATCH), np.exp(token) * kept)


@pytest.mark.parametrize("gate", ["binary_kl", "tv"])
def test_a_band_of_divergences(gate):
    p, q = np.exp(ROLLOUT), np.exp(OLD)
    distance = np.abs(p - q) if gate == "tv" else p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    ratio = q / p
    for level, at in (("token", distance), ("sequence", per_sequence(distance))):
        weight = ratio if level == "token" else np.exp(per_sequence(np.log(ratio)))
        got = ImportanceBand(0.0, 0.2, "mask", level, gate)(BATCH)
        close(got, np.where(at <= 0.2, weight, 0.0))
        assert 0 < np.count_nonzero(got) < MASK.sum()
    # Probabilities are held inside 1e-6: KL(1 − 1e-6 ‖ 1e-6) = 13.815; float32 holds 1 − 1e-6 to 1 %.
    sure = BATCH._replace(old_logprobs=jnp.full(MASK.shape, -50.0), rollout_logprobs=jnp.zeros(MASK.shape))
    limit = {"tv": 0.999998, "binary_kl": 13.81548}[gate]
    for high, some in ((limit * 0.997, False), (limit * 1.003, True)):
        assert np.any(ImportanceBand(0.0, high, "mask", "token", gate)(sure)) == some
    back = sure._replace(old_logprobs=sure.rollout_logprobs, rollout_logprobs=sure.old_logprobs)
    for high, some in ((limit * 0.997, False), (limit * 1.003, True)):
        assert np.any(ImportanceBand(0.0, high, "mask", "token", gate)(back)) == some


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((-0.1, 1.0), "need 0"),
        ((1.1, 1.0), "need 0"),
        ((0.0, 1.0, "cut"), "mode must be"),
        ((0.0, 1.0, "mask", "token", "k3"), "gate must be"),
        ((0.0, 1.0, "clip", "token", "tv"), "can only mask"),
    ],
)
def test_a_band_that_means_nothing_is_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        ImportanceBand(*arguments)


def test_the_bounds_of_a_band_may_be_equal_and_are_inside():
    assert ImportanceBand(0.0, 0.0).high == 0.0
    same = BATCH._replace(rollout_logprobs=BATCH.old_logprobs)
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        np.testing.assert_array_equal(ImportanceBand(low, high, "mask")(same), MASK)


KL_NUMBERS = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) + d - 1, "abs": np.abs}


@pytest.mark.parametrize("name", KL_NUMBERS)
def test_a_kl_between_bounds(name):
    d = np.clip(NEW - REF, -0.5, 0.7)
    value = KL_NUMBERS[name](d)
    close(BoundedKL(name, low=-0.5, high=0.7).estimate(BATCH), value)
    close(BoundedKL(name, low=-0.5, high=0.7, bound=0.1).estimate(BATCH), np.clip(value, -0.1, 0.1))


def test_the_gradients_and_weights_of_a_kl():
    d, ratio, one = NEW - REF, np.exp(D), np.ones(MASK.shape)
    k3 = np.exp(-d) + d - 1
    own = 1 - np.exp(-d)
    at = {"own": own, "k2": d, "weighted k2": np.minimum(ratio, 10.0) * d, "score": own + k3}
    for name, expected in at.items():
        close(BoundedKL("k3", gradient=name).estimate(BATCH), k3)
        close(gradient(BoundedKL("k3", gradient=name).estimate), expected)
    far = BATCH._replace(old_logprobs=BATCH.logprobs - 3.0)
    close(gradient(BoundedKL("k1", gradient="weighted k2").estimate, far), 10.0 * d)
    weights = {"token": ratio, "sequence": np.exp(per_sequence(D)), "rollout": np.exp(NEW - ROLLOUT), None: one}
    for name, weight in weights.items():
        close(BoundedKL("k3", weight=name).estimate(BATCH), weight * k3)
    close(gradient(BoundedKL("k1", weight="token").estimate), ratio * (1 + d))
    with pytest.raises(ValueError, match="rollout_logprobs; it is None"):
        BoundedKL("k3", weight="rollout").estimate(BATCH._replace(rollout_logprobs=None))
    bads: list[tuple[str, Any]] = [("gradient", "none"), ("weight", "word"), ("estimator", "k3+"), ("coef", -0.1)]
    for argument, bad in bads:
        with pytest.raises(ValueError, match=r"must|instead"):
            BoundedKL(**{argument: bad})


def test_gates_shut_tokens_and_leave_the_count():
    gates = (lambda b: b.advantages > 0, lambda b: b.logprobs > -1.0)
    close(Gated(Reinforce(), gates)(BATCH), np.where((A > 0) & (NEW > -1.0), -A * NEW, 0.0))
    drift = {False: per_sequence(OLD - NEW), True: per_sequence(ROLLOUT - NEW)}
    for use_vllm, drifted in drift.items():
        np.testing.assert_array_equal(
            np.asarray(OffPolicyGate(0.4, use_vllm)(BATCH))[MASK], ~((A < 0) & (drifted > 0.4))[MASK]
        )
    assert not np.array_equal(drift[False] > 0.4, drift[True] > 0.4)
    with pytest.raises(ValueError, match="rollout_logprobs; it is None"):
        OffPolicyGate(0.05, True)(BATCH._replace(rollout_logprobs=None))
    assert OffPolicyGate(0.05) == OffPolicyGate(0.05, use_vllm=False)
    assert OffPolicyGate(0.05)(BATCH._replace(rollout_logprobs=None)).shape == MASK.shape


def test_the_highest_entropies_alone_depend_on_the_batch():
    row_by_row = (OffPolicyGate(0.1), SequenceSapo((), "token"), RatioClip(0.2, 0.2), TokenLoss(sapo, ()))
    assert not any(part.over_batch for part in row_by_row)
    assert EntropyGate(0.5).over_batch and Gated(Reinforce(), (EntropyGate(0.5),)).over_batch


def test_the_highest_entropies():
    cut = np.quantile(H[MASK].astype(np.float32), 0.75)
    high = MASK & (cut <= H)
    np.testing.assert_array_equal(EntropyGate(0.25)(BATCH), high)
    total, count = OverHighEntropy(fraction=0.25)(BATCH.entropies, BATCH.mask, None)
    np.testing.assert_allclose([total, count], [H[high].sum(), high.sum()], rtol=1e-6)
    assert float(OverHighEntropy()(BATCH.entropies, BATCH.mask, None).denominator) == MASK.sum()
    # The quantile is of all tokens, whichever rows they are packed in.
    packed = BATCH._replace(entropies=BATCH.entropies.reshape(1, -1), mask=BATCH.mask.reshape(1, -1))
    np.testing.assert_array_equal(EntropyGate(0.25)(packed), high.reshape(1, -1))
    assert EntropyGate(0.25).accepts_packed
    with pytest.raises(ValueError, match="entropies; it is None"):
        EntropyGate(0.25)(BATCH._replace(entropies=None))
    # At a quantile that is one of them, that token stays.
    five = BATCH._replace(entropies=jnp.arange(5.0)[None], mask=jnp.ones((1, 5), bool))
    assert np.asarray(EntropyGate(0.5)(five)).tolist() == [[False, False, True, True, True]]
    moved = jax.grad(lambda x: OverHighEntropy(fraction=0.25)(x, BATCH.mask, None).total)(BATCH.entropies)
    np.testing.assert_array_equal(moved, high)


def test_vespo_takes_the_correction_into_its_sequence_weight():
    constants = (("k_pos", 1.5), ("lambda_pos", 2.5), ("k_neg", 2.0), ("lambda_neg", 1.0))
    close(Vespo(constants)(BATCH), ORACLE["vespo"](NEW, OLD, A, MASK, **dict(constants)), rtol=1e-4)
    weight = np.clip(np.exp(OLD - ROLLOUT), 0.5, 3.0)
    got = Vespo(constants, ImportanceBand(0.5, 3.0))(BATCH)
    close(got, ORACLE["vespo"](NEW, OLD - np.log(weight), A, MASK, **dict(constants)), rtol=1e-4)
    # A weight of 0 counts as 1e-8.
    none = Vespo((("k_pos", 0.0), ("lambda_pos", 0.0), ("k_neg", 0.0), ("lambda_neg", 0.0)), ImportanceBand(0.0, 0.0))
    assert np.isfinite(none(BATCH)).all()
    with pytest.raises(ValueError, match="rollout_logprobs; it is None"):
        Vespo(constants, ImportanceBand())(BATCH._replace(rollout_logprobs=None))


def test_aggregations_of_rows_and_of_the_padded_width():
    x = jnp.asarray(A, jnp.float32)
    rows = (A * MASK).sum(1) / np.maximum(MASK.sum(1), 1)
    mean = AllRows("seq-mean-token-mean")(x, BATCH.mask, None)
    np.testing.assert_allclose([mean.total, mean.denominator], [rows.sum(), 4.0], rtol=1e-5, atol=1e-6)
    norm = AllRows("seq-mean-token-sum-norm", 8.0)(x, BATCH.mask, None)
    np.testing.assert_allclose(norm.value(), (A * MASK).sum() / 4 / 8, rtol=1e-5)
    stack = AllRows("seq-mean-token-sum")(x.reshape(2, 2, -1), BATCH.mask.reshape(2, 2, -1), None)
    assert stack.denominator == 4.0
    np.testing.assert_allclose(stack.total, (A * MASK).sum(), rtol=1e-5)
    wide = OverWidth()(x, BATCH.mask, None)
    np.testing.assert_allclose([wide.total, wide.denominator], [(A * MASK).sum(), 3 * 6], rtol=1e-5)
    assert OverWidth()(x[:, :1], BATCH.mask[:, :1], None).denominator == 2
    with pytest.raises(ValueError, match="unpack segment_ids first"):
        AllRows("seq-mean-token-mean")(x, BATCH.mask, jnp.zeros(MASK.shape, jnp.int32))


@pytest.mark.parametrize("apart", ["kl", "entropy", "both"])
def test_terms_that_are_averaged_apart(apart):
    tokens, completions = Aggregation("token-mean"), Aggregation("seq-mean-token-mean")
    objective = Objective(
        "it", RawReward(), Reinforce(), completions, kl=BoundedKL("k2", 0.3), entropy=EntropyBonus(0.2), strict=False
    )
    objective = objective.replace(
        kl_aggregation=tokens if apart != "entropy" else None, entropy_aggregation=tokens if apart != "kl" else None
    )

    def mean(x):
        return (x * MASK).sum() / MASK.sum()

    def of_answers(x):
        return ((x * MASK).sum(1) / np.maximum(MASK.sum(1), 1)).sum() / 3

    k2 = (NEW - REF) ** 2 / 2
    kl, entropy = (mean if apart != "entropy" else of_answers)(k2), (mean if apart != "kl" else of_answers)(H)
    loss, metrics = objective(BATCH)
    np.testing.assert_allclose(loss, of_answers(-A * NEW) + 0.3 * kl - 0.2 * entropy, rtol=2e-5)
    np.testing.assert_allclose([metrics["kl"], metrics["entropy"]], [mean(k2), mean(H)], rtol=2e-5)
    # Nothing to average is 0, and the metric of the KL carries no gradient.
    assert objective(BATCH._replace(mask=jnp.zeros(MASK.shape, bool)))[0] == 0.0
    assert not jax.grad(lambda x: objective(BATCH._replace(logprobs=x))[1]["kl"])(BATCH.logprobs).any()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
def test_a_ratio_of_an_excluded_token_has_finite_loss_and_gradient(level):
    old, advantages = jnp.full((1, 3), -1.0), jnp.ones((1, 3))
    for limit in (np.inf, 20.0):
        loss = RatioClip(0.2, 0.2, level=level, limit=limit)

        def total(new, loss=loss):
            return loss(Batch(new, old, advantages, jnp.ones((1, 3), bool))).sum()

        value, slope = jax.value_and_grad(total)(jnp.array([[-1.0, -jnp.inf, -0.9]]))
        assert jnp.isfinite(value) and jnp.isfinite(slope).all() and slope[0, 1] == 0.0
