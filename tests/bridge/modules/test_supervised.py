import copy
import math

import pytest
import torch

from rl_bridge.algorithms.supervised_training import held_out_nll, supervised_batch, supervised_update
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.encoding import encode_row
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.direct_engine import Direct
from tests.support.ready import ready

BATCH = collate([single_turn([2, 3, 4], [4, 5, 1]), single_turn([6], [7, 1])], 0)


@pytest.fixture
def module(new_model):
    return ready(SupervisedModule, new_model(), OptimizerConfig(learning_rate=1e-2, warmup=2), updates=10)


def test_supervision_is_the_mean_negative_log_likelihood(module):
    metrics = module.train_step(BATCH, float(BATCH.mask.sum()))
    got = [p.grad.clone() for p in module.model.parameters()]
    module.zero_grad()
    total = 0.0
    for row in ([2, 3, 4, 4, 5, 1], [6, 7, 1]):
        ids, answer = torch.tensor([row]), 3 if len(row) == 6 else 2
        labels = torch.cat([torch.full((1, len(row) - answer), -100), ids[:, -answer:]], 1)
        total += module.model(input_ids=ids, labels=labels).loss * answer / 5
    total.backward()
    assert float(metrics["nll"].total) / 5 == pytest.approx(float(total.detach()), rel=1e-5)
    for a, p in zip(got, module.model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def test_supervision_does_not_depend_on_the_micro_batches(module):
    def gradient(tokens):
        module.scoring = ScoringConfig(micro_batch_tokens=tokens)
        module.zero_grad()
        metrics = module.train_step(BATCH, 5.0)
        return torch.cat([p.grad.flatten() for p in module.model.parameters()]), float(metrics["nll"].total)

    (whole, nll), (cut, nll_cut) = gradient(10**6), gradient(1)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    assert nll_cut == pytest.approx(nll, rel=1e-5)


def test_training_lowers_the_loss(module):
    losses = []
    for _ in range(8):
        losses.append(float(module.train_step(BATCH, 5.0)["nll"].total))
        module.optimizer_step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_step_is_adamw_on_the_clipped_gradient(module):
    twin = copy.deepcopy(module.model)
    plain = torch.optim.AdamW(twin.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
    module.train_step(BATCH, 0.05)
    for p, q in zip(module.model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    norm = math.sqrt(sum(float(q.grad.square().sum()) for q in twin.parameters()))
    for q in twin.parameters():
        q.grad /= norm
    plain.step()
    metrics = module.optimizer_step()
    assert metrics == {"grad_norm": pytest.approx(norm, rel=1e-4), "learning_rate": 5e-3} and norm > 1
    for p, q in zip(module.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert p.grad is None
    assert module.weights_version() == 1


def test_a_batch_in_which_no_token_counts_is_refused(module):
    nothing = BATCH._replace(mask=torch.zeros_like(BATCH.mask))
    with pytest.raises(ValueError, match=r"none of the 9 tokens in the batch's 2 rows counts: mask must be True"):
        supervised_update(Direct(module), nothing)
    assert module.weights_version() == 0 and all(p.grad is None for p in module.model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["gradient", "loss"])
def test_an_update_that_is_not_finite_is_skipped(module, value, of):
    def update(m, spoil=False):
        m.train_step(BATCH, 5.0)
        if spoil and of == "gradient":
            next(m.model.parameters()).grad.view(-1)[3] = value
        elif spoil:  # a loss that has no gradient, so that only the loss is not finite
            m.backward(torch.tensor(value, requires_grad=True))
        return m.optimizer_step()

    update(module)
    twin = copy.deepcopy(module)
    before = copy.deepcopy(module.checkpoint_state())
    metrics = update(module, spoil=True)
    assert metrics["skipped"] == 1.0 and metrics["learning_rate"] == pytest.approx(1e-2)
    assert math.isfinite(metrics["grad_norm"]) == (of == "loss")
    after = module.checkpoint_state()
    assert (after["version"], after["scheduler"]) == (1, before["scheduler"])
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert all(p.grad is None for p in module.model.parameters())
    # What comes next is as if the step had not been.
    assert [update(module) for _ in range(2)] == [update(twin) for _ in range(2)]
    assert "skipped" not in update(module) and module.weights_version() == 4


def test_a_saved_state_goes_on_bit_for_bit(module, new_model):
    def update(m):
        m.train_step(BATCH, 5.0)
        return m.optimizer_step()

    update(module)
    state = copy.deepcopy(module.checkpoint_state())
    resumed = ready(SupervisedModule, new_model(seed=9), OptimizerConfig(learning_rate=1e-2, warmup=2), updates=10)
    resumed.load_checkpoint_state(state)
    assert resumed.weights_version() == 1
    assert [update(resumed) for _ in range(3)] == [update(module) for _ in range(3)]
    for a, b in zip(module.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_updates_follow_the_schedule(module):
    rates = []
    for _ in range(12):
        module.train_step(BATCH, 5.0)
        rates.append(module.optimizer_step()["learning_rate"])
    config = module.optimizer_config
    assert rates == pytest.approx([config.learning_rate * config.scale(step, 10) for step in range(12)])


def test_a_supervised_batch_is_the_rows_own_answers(tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "5=", "answer": "55"}]
    batch = supervised_batch(rows, lambda row: encode_row(tokenizer, row), 0)
    assert tokenizer.batch_decode(batch.tokens) == ["1+1=2<eos>", "5=55<eos><pad>"]
    assert batch.mask.tolist() == [[False] * 4 + [True] * 2, [False] * 2 + [True] * 3 + [False]]


def test_rows_in_which_no_token_counts_have_no_loss(module):
    """A held-out loss of 0 would stay the best one for ever."""
    rows = BATCH._replace(mask=torch.zeros_like(BATCH.mask))
    with pytest.raises(ValueError, match=r"none of the 9 tokens in the batch's 2 rows counts: .* is to be measured"):
        held_out_nll(Direct(module), rows)
    with pytest.raises(ValueError, match=r"none of the 9 tokens in the batch's 2 rows counts: .* is to be learnt"):
        supervised_update(Direct(module), rows)
    assert held_out_nll(Direct(module), BATCH) > 0
