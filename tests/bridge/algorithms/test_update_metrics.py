"""What an update shows: of all rows that count, whichever rows were computed."""

import numpy as np
import pytest
import torch

from rl_bridge.algorithms.policy_training import critic_update, over_counted, policy_update
from rl_bridge.modules.policy import mean
from rl_fn import Ratio
from tests.bridge.algorithms.fake_engines import FakePolicy
from tests.rl_fn.recipe_batches import OBJECTIVES, batch, loss_alone, mapped

OF_COMPUTED = {"ratio_mean", "approx_kl", "kl", "entropy", "mismatch_k3", "correction_weight"}
"""What these are of a row that was left out is not known."""
OF_ALL = {"policy_loss", "clip_fraction"}
LEAVING_OUT = {loss_alone(o.replace(kl=None, entropy=None)): name for name, o in OBJECTIVES.items()}
LEAVING_OUT = {name: o for o, name in LEAVING_OUT.items() if not (o.gradient_without_advantage or o.over_batch)}


@pytest.fixture(scope="module")
def whole():
    """Every third row has no advantage."""
    made = batch(OBJECTIVES["grpo"], 3)
    advantages = np.random.default_rng(0).normal(size=(len(made.mask), 1)).astype(np.float32)
    advantages[1::3] = 0
    return made._replace(advantages=advantages * made.mask)


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_leaving_rows_out_changes_no_metric_that_is_said_to_be_of_all(name, whole):
    """MUS-2: the policy's loss was shown as 0.0198 where the loss whose gradient is taken was 0.0132."""
    objective, kept = LEAVING_OUT[name], np.arange(len(whole.mask)) % 3 != 1
    every, computed = (objective.parts(of)[1] for of in (whole, mapped(lambda x: x[kept], whole)))
    shown = over_counted(computed, float(objective.denominator(whole.mask)), int(whole.mask.sum()))
    assert shown.keys() == every.keys() and "policy_loss" in shown and shown.keys() <= OF_COMPUTED | OF_ALL
    for metric in shown:
        wanted = every if metric in OF_ALL else computed
        assert mean(shown[metric]) == pytest.approx(mean(wanted[metric]), rel=1e-4, abs=5e-6), metric


class OfNothing(FakePolicy):
    """A sum, a mean, and a mean over nothing."""

    def train_step(self, batch, denominator, coefficients=None):
        parts = {"policy_loss": (6.0, 3.0), "entropy": (6.0, 4.0), "kl": (0.0, 0.0)}
        return {name: Ratio(*map(torch.tensor, part)) for name, part in parts.items()}


def test_a_sum_is_shown_and_a_mean_over_nothing_is_not():
    nothing = {"grad_norm": 1.0}
    assert policy_update(OfNothing(), None, 0.0, 4, {}) == nothing | {"policy_loss": 6.0, "entropy": 1.5}
    assert policy_update(OfNothing(), None, 2.0, 4, {}) == nothing | {"policy_loss": 3.0, "entropy": 1.5}
    critic = critic_update(OfNothing(), None, 0.0)
    assert critic == {"critic_grad_norm": 1.0, "policy_loss": 2.0, "entropy": 1.5}
