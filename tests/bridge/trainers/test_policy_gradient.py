"""The gradient of a PolicyModule: the one of the formulas, whatever the padding and the cut into micro-batches."""

import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.models.tiny import tiny_qwen2
from rl_bridge.trainers.module import OptimizerConfig
from rl_bridge.trainers.policy import PolicyModule, mean
from rl_bridge.trainers.scoring import ScoringConfig
from rl_bridge.types import Completion, TokenBatch, collate
from rl_fn import components as p

PAD = 0
NAN, INF = float("nan"), float("inf")
OBJECTIVES = {
    "grpo": rl_fn.recipes.grpo(),
    "dapo": rl_fn.recipes.dapo(),
    "entropy": rl_fn.recipes.dapo().replace(entropy=p.EntropyBonus(0.1), correction=p.TIS(1.1)),
}


def make_batch(rows=6, seed=0):
    """Unequal prompts and answers; π_old, μ and π_ref of some other model; two rows without advantage."""
    g = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(2, 15, (int(torch.randint(low, high, (1,), generator=g)),), generator=g).tolist()

    answers = [Completion(ids(1, 6), ids(2, 8), [], "", True) for _ in range(rows)]
    batch = collate([Completion(a.prompt_ids, a.token_ids, [0.0] * len(a.token_ids), "", True) for a in answers], PAD)

    def noise(scale):
        return (-2.7 + scale * torch.randn(batch.mask.shape, generator=g)).masked_fill(~batch.mask, 0.0)

    advantages = torch.randn(rows, 1, generator=g) * torch.tensor([1.0, 1, 0, 1, 0, 1])[:rows, None]
    return batch._replace(
        rollout_logprobs=noise(0.3),
        old_logprobs=noise(0.3),
        ref_logprobs=noise(0.3),
        advantages=advantages.expand(batch.mask.shape) * batch.mask,
    )


@pytest.fixture(scope="module")
def policies(tokenizer):
    """One module an objective, as each is traced anew; no test updates it."""
    made = {}

    def policy(objective):
        if objective not in made:
            model = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2, seed=3)
            made[objective] = PolicyModule(model, OptimizerConfig(learning_rate=1e-3), objective, updates=1)
        return made[objective]

    return policy


@pytest.fixture
def gradients(policies):
    """The whole gradient and the metrics of a batch."""

    def compute(batch, objective, micro_batch_tokens=10**6, temperature=1.0):
        module = policies(objective)
        module.scoring = ScoringConfig(micro_batch_tokens=micro_batch_tokens, temperature=temperature)
        module.zero_grad()
        metrics = module.train_step(batch, float(objective.denominator(batch.mask.numpy())))
        gradient = torch.cat([p.grad.flatten() for p in module.model.parameters()])
        return gradient, {name: mean(value) for name, value in metrics.items()}

    return compute


def assert_close(got, wanted, tolerance=1e-6):
    assert torch.isfinite(got[0]).all() and wanted[0].norm() > 1e-3
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=tolerance)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("tokens", [1, 25])
def test_micro_batches_change_nothing(gradients, name, tokens):
    batch = make_batch()
    assert_close(gradients(batch, OBJECTIVES[name], tokens), gradients(batch, OBJECTIVES[name]))


def pad(batch, left, right, junk):
    """More pad columns on both sides, and junk where nothing counts."""
    n = torch.nn.functional.pad

    def values(x):
        return n(x.masked_fill(~batch.mask, junk), (0, right), value=junk)

    return TokenBatch(
        n(batch.input_ids, (left, right)),
        batch.padding + left,
        n(batch.completion_ids, (0, right)),
        n(batch.mask, (0, right)),
        *(values(x) for x in batch[4:]),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("junk", [0.0, NAN, INF])
def test_padding_and_what_lies_there_change_nothing(gradients, monkeypatch, name, junk):
    batch = make_batch()
    wanted = gradients(batch, OBJECTIVES[name])
    assert_close(gradients(pad(batch, 2, 3, junk), OBJECTIVES[name], 1), wanted)
    monkeypatch.setattr(TokenBatch, "trim", lambda self: self)  # the padded columns do reach the model
    assert_close(gradients(pad(batch, 2, 3, junk), OBJECTIVES[name]), wanted)


def test_padded_columns_do_not_move_a_token_s_logprob(policies, monkeypatch):
    module = policies(OBJECTIVES["dapo"])
    module.scoring = ScoringConfig(micro_batch_tokens=10**6)
    batch = make_batch()
    monkeypatch.setattr(TokenBatch, "trim", lambda self: self)
    padded = module.token_logprobs(pad(batch, 3, 2, 0.0))
    monkeypatch.undo()
    module.scoring = ScoringConfig(micro_batch_tokens=1)
    alone = module.token_logprobs(batch)
    assert padded.shape[1] == alone.shape[1] + 2 and not padded[:, -2:].any()
    torch.testing.assert_close(padded[:, :-2], alone, rtol=0, atol=1e-6)
    assert bool((alone[batch.mask] < 0).all()) and bool((alone[~batch.mask] == 0).all())
    for i in range(len(batch.mask)):  # and against the model itself, unpadded
        row = batch.rows(slice(i, i + 1)).trim()
        ids = torch.cat([row.input_ids[:, : -row.mask.shape[1]], row.completion_ids], 1)
        with torch.no_grad():
            logprobs = module.model(input_ids=ids).logits.log_softmax(-1)[:, -row.mask.shape[1] - 1 : -1]
        wanted = logprobs.gather(-1, row.completion_ids[..., None])[0, :, 0]
        torch.testing.assert_close(alone[i, : len(wanted)], wanted, rtol=0, atol=1e-5)


def model_outputs(model, batch, temperature):
    """Log-probabilities and entropies of the completion tokens, row by row and unpadded, in plain torch."""
    width = batch.mask.shape[1]
    rows, entropies = [], []
    for i, left in enumerate(batch.padding.tolist()):
        logits = model(input_ids=batch.input_ids[i : i + 1, left:]).logits[0, -width - 1 : -1] / temperature
        logp = logits.log_softmax(-1)
        rows.append(logp.gather(-1, batch.completion_ids[i, :, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.stack(rows), torch.stack(entropies)


def by_hand(name, logp, entropy, b):
    """The three objectives written out from their papers."""
    ratio = (logp - b.old_logprobs).exp()
    high = 0.2 if name == "grpo" else 0.28
    loss = -torch.minimum(ratio * b.advantages, ratio.clamp(1 - 0.2, 1 + high) * b.advantages)
    if name == "entropy":
        loss = (b.old_logprobs - b.rollout_logprobs).exp().clamp(max=1.1) * loss - 0.1 * entropy
    if name != "grpo":
        return loss[b.mask].mean()
    d = logp - b.ref_logprobs
    loss = loss + 0.04 * ((-d).exp() + d - 1)
    return ((loss * b.mask).sum(1) / b.mask.sum(1)).mean()


@pytest.mark.parametrize(("name", "temperature"), [("grpo", 1.0), ("dapo", 0.7), ("entropy", 1.0)])
def test_the_gradient_is_that_of_the_formula_in_plain_torch(gradients, new_model, name, temperature):
    batch, model = make_batch(), new_model(seed=3)
    logp, entropy = model_outputs(model, batch, temperature)
    by_hand(name, logp, entropy, batch).backward()
    logp, entropy = logp.detach(), entropy.detach()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    got, metrics = gradients(batch, OBJECTIVES[name], temperature=temperature)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert metrics["entropy"] == pytest.approx(float(entropy[batch.mask].mean()), rel=1e-4)
    d = (logp - batch.ref_logprobs)[batch.mask]
    assert metrics["kl"] == pytest.approx(float(((-d).exp() + d - 1).mean()), rel=1e-3)


def test_the_entropy_bonus_and_it_alone_raises_the_entropy(gradients):
    batch = make_batch()._replace(advantages=torch.zeros(6, make_batch().mask.shape[1]))
    assert not gradients(batch, rl_fn.recipes.dapo())[0].any()
    gradient, _ = gradients(batch, rl_fn.recipes.dapo().replace(entropy=p.EntropyBonus(0.1)))
    twice, _ = gradients(batch, rl_fn.recipes.dapo().replace(entropy=p.EntropyBonus(0.2)))
    assert gradient.norm() > 1e-4
    torch.testing.assert_close(twice, 2 * gradient)


def test_a_metric_that_is_only_shown_has_no_gradient(gradients):
    batch = make_batch()
    without = batch._replace(ref_logprobs=None)
    assert_close((gradients(batch, rl_fn.recipes.dapo())[0], {}), (gradients(without, rl_fn.recipes.dapo())[0], {}))


def rows_with_a_gradient(batch, objective):
    """The groups are of rows whose rewards differ: dynamic sampling leaves none out."""
    read = rl_fn.Rollouts(np.arange(6.0, dtype=np.float32)[None], batch.mask.numpy()[None])
    selected = objective.selection(read, batch.advantages.numpy()[None])
    assert np.array_equal(selected.mask[0], batch.mask)
    return torch.as_tensor(np.flatnonzero(selected.rows))


def test_rows_without_advantage_only_rescale_the_gradient(gradients):
    batch, objective = make_batch(), OBJECTIVES["dapo"]
    index = rows_with_a_gradient(batch, objective)
    assert index.tolist() == [0, 1, 3, 5]
    few, all_rows = gradients(batch.rows(index), objective)[0], gradients(batch, objective)[0]
    share = float(batch.rows(index).mask.sum() / batch.mask.sum())
    torch.testing.assert_close(few * share, all_rows, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "entropy"])
def test_with_kl_or_entropy_every_row_has_a_gradient(name):
    assert rows_with_a_gradient(make_batch(), OBJECTIVES[name]).tolist() == list(range(6))


@pytest.mark.parametrize("field", ["old_logprobs", "advantages"])
def test_what_a_step_needs(gradients, field):
    with pytest.raises(ValueError, match=r"train_step needs batch\.old_logprobs and batch\.advantages"):
        gradients(make_batch()._replace(**{field: None}), OBJECTIVES["dapo"])


def test_a_kl_objective_needs_the_reference(gradients):
    with pytest.raises(ValueError, match=r"which needs batch\.ref_logprobs; it is None"):
        gradients(make_batch()._replace(ref_logprobs=None), OBJECTIVES["grpo"])
