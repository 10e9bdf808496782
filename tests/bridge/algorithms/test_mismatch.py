"""Metrics of a rollout that samples from another policy than the trainer's."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.algorithms.policy_training import ALARM, Mismatch
from rl_bridge.data.token_batch import TokenBatch
from rl_fn import components
from tests.bridge.algorithms.fake_engines import longest_is_best, run_loop

DAPO = rl_fn.recipes.dapo()
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)


def parts(spread, seed=0):
    """Two parts of one batch, with log-ratios of this spread."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(MASK.shape, generator=generator) - 1
    old = rollout + spread * torch.randn(MASK.shape, generator=generator)
    fields = {"rollout_logprobs": rollout, "old_logprobs": old, "advantages": torch.ones(MASK.shape), "mask": MASK}
    batch = TokenBatch(tokens=MASK.long(), lengths=torch.full((3,), 4), groups=torch.arange(3), **fields)
    return [batch.rows(torch.tensor([0, 2])), batch.rows(torch.tensor([1]))], old, rollout


def test_the_parts_together_give_rl_fns_metrics():
    several, old, rollout = parts(0.5)
    found = Mismatch(DAPO, least_share=0.0).metrics(several)
    wanted = rl_fn.mismatch_metrics(jnp.asarray(old), jnp.asarray(rollout), jnp.asarray(MASK.numpy()))
    for name, value in wanted._asdict().items():
        np.testing.assert_allclose(found[f"mismatch/{name}"], float(value), rtol=1e-5, err_msg=name)
    assert found.keys() == {*(f"mismatch/{name}" for name in wanted._fields), ALARM}


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (components.TIS(cap=1.2), lambda w: np.minimum(w, 1.2)),
        (components.IcePop(low=0.7, high=1.4), lambda w: np.where((w < 0.7) | (w > 1.4), 0.0, w)),
    ],
    ids=["tis", "icepop"],
)
def test_what_a_correction_leaves_is_measured_too(correction, weights):
    several, old, rollout = parts(0.5)
    found = Mismatch(DAPO.replace(correction=correction), least_share=0.0).metrics(several)
    ratios = np.exp((old - rollout).numpy()[MASK.numpy()])
    kept = weights(ratios)
    assert 0 < found["corrected/changed_share"] < 1
    np.testing.assert_allclose(found["corrected/changed_share"], (kept != ratios).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["corrected/weight_mean"], kept.mean(), rtol=1e-5)
    share = kept.sum() ** 2 / (kept**2).sum() / len(kept)
    np.testing.assert_allclose(found["corrected/effective_sample_share"], share, rtol=1e-5)


TIS, HIGH = components.TIS(cap=1.2), components.HighEntropyMask(0.8)
ALSO_ENTROPY = components.Custom(lambda batch: batch.entropies, ("rollout_logprobs", "entropies"))


@pytest.mark.parametrize(
    ("correction", "measured"),
    [
        (components.Product((TIS, HIGH)), TIS),
        (
            components.Product((HIGH, components.Rejection(0.1), TIS)),
            components.Product((components.Rejection(0.1), TIS)),
        ),
        (HIGH, None),
        (components.Product((HIGH, ALSO_ENTROPY)), None),
        (ALSO_ENTROPY, None),
    ],
    ids=["weight and mask", "three", "mask alone", "none of two", "a function"],
)
def test_parts_that_read_what_is_not_there_are_left_out(correction, measured):
    several = parts(0.5)[0]
    found = Mismatch(DAPO.replace(correction=correction), least_share=0.0).metrics(several)
    assert found == Mismatch(DAPO.replace(correction=measured), least_share=0.0).metrics(several)
    assert any(name.startswith("corrected/") for name in found) == (measured is not None)


def test_the_alarm_is_told_once_and_recorded_always():
    mismatch = Mismatch(DAPO, least_share=0.9)
    calm, loud = mismatch.metrics(parts(0.01)[0]), mismatch.metrics(parts(2.0)[0])
    assert (calm[ALARM], loud[ALARM]) == (0.0, 1.0)
    assert mismatch.warning(calm) is None
    share = loud["mismatch/effective_sample_share"]
    warning = str(mismatch.warning(loud))
    assert f"{share:.2f} (mismatch/effective_sample_share)" in warning and "least_effective_share is 0.9" in warning
    assert mismatch.warning(loud) is None
    assert mismatch.metrics([]) == {}


def test_a_run_that_recomputes_old_logprobs_records_them():
    """The policy of this loop says −1 and then −4, the rollout always −1."""
    run, _, _ = run_loop(longest_is_best, updates_per_step=3, recompute_old_logprobs=True)
    assert [record["mismatch/k1"] for record in run.records] == pytest.approx([0.0, 3.0])
    assert [record["mismatch/effective_sample_share"] for record in run.records] == pytest.approx([1.0, 1.0])
    assert [record[ALARM] for record in run.records] == [0.0, 0.0]
    run, _, _ = run_loop(longest_is_best)
    assert ALARM not in run.records[0]
    with pytest.raises(ValueError, match="least_effective_share must be from 0 to 1, got 2"):
        run_loop(longest_is_best, recompute_old_logprobs=True, least_effective_share=2)
