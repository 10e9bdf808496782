"""The gradient of a PolicyModule: the one of the formulas, whatever the padding and the cut into micro-batches."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.algorithms.policy_training import minibatches_of
from rl_bridge.data.token_batch import TokenBatch, micro_batches
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig, Trainable
from rl_fn import Rollouts, components
from tests.support.policy_batch import make_batch
from tests.support.ready import ready
from tests.support.trajectories import widened

NAN, INF = float("nan"), float("inf")
OBJECTIVES = {
    "grpo": rl_fn.recipes.grpo(),
    "dapo": rl_fn.recipes.dapo(),
    "entropy": rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.1), correction=components.TIS(1.1)),
}
# Statistics of the whole batch decide which tokens these losses and weights act on.
OVER_BATCH = {
    "clip_cov": rl_fn.recipes.clip_cov(fraction=0.3, cov_low=-9.0, cov_high=9.0),
    "kl_cov": rl_fn.recipes.kl_cov(fraction=0.2),
    "m2po": rl_fn.recipes.m2po(threshold=0.01),
    "high entropy": rl_fn.recipes.dapo().replace(
        entropy=components.EntropyBonus(0.1), correction=components.HighEntropyMask(0.3)
    ),
}


def selected(batch, objective, rewards=(0.0, 1.0, 0.5, 2.0, 2.0, 2.0), count=1):
    """Rows that each minibatch computes, and its denominator; two groups of three, the second without a signal."""
    groups = Rollouts(np.array(rewards, np.float32).reshape(2, 3), batch.mask.numpy().reshape(2, 3, -1))
    advantages = batch.advantages.numpy().reshape(2, 3, -1)
    computed, counted = (torch.from_numpy(np.array(x)).flatten(0, 1) for x in objective.selection(groups, advantages))
    return [
        value
        for index, _, mask in minibatches_of(computed, counted, count)
        for value in (index.tolist(), float(objective.denominator(mask.numpy())))
    ]


def undeclared(batch):
    """A custom loss that says nothing of itself: advantages against their mean over all tokens."""
    centred = batch.advantages - batch.advantages.sum() / jnp.sum(batch.mask, dtype=batch.advantages.dtype)
    return -centred * batch.logprobs


@pytest.fixture(scope="module")
def policies(tokenizer):
    """One module an objective, as each is traced anew; no test updates it."""
    made = {}

    def policy(objective):
        if objective not in made:
            model = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2, seed=3)
            made[objective] = ready(PolicyModule, model, OptimizerConfig(learning_rate=1e-3), objective, updates=1)
        return made[objective]

    return policy


@pytest.fixture
def gradients(policies):
    """The whole gradient and the metrics of a batch."""

    def compute(batch, objective, micro_batch_tokens=10**6, temperature=1.0, denominator=None):
        module = policies(objective)
        module.scoring = ScoringConfig(micro_batch_tokens=micro_batch_tokens, temperature=temperature)
        module.zero_grad()
        whole = float(objective.denominator(batch.mask.numpy())) if denominator is None else denominator
        metrics = module.train_step(batch, whole)
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


@pytest.mark.parametrize("name", OVER_BATCH)
@pytest.mark.parametrize("tokens", [1, 25])
def test_statistics_are_of_the_whole_batch_however_it_is_cut(gradients, name, tokens):
    batch, objective = make_batch(), OVER_BATCH[name]
    assert_close(gradients(batch, objective, tokens), gradients(batch, objective))


@pytest.mark.parametrize("name", OVER_BATCH)
def test_statistics_are_of_both_of_two_micro_batches(gradients, name):
    batch, objective = make_batch(), OVER_BATCH[name]
    half = 3 * batch.tokens.shape[1]
    assert [len(part.places) for part in micro_batches(batch, half)] == [3, 3]
    assert_close(gradients(batch, objective, half), gradients(batch, objective))


def test_a_custom_loss_gets_the_whole_batch_and_its_rows_without_advantage(gradients):
    batch, objective = make_batch(), rl_fn.recipes.dapo().replace(loss=undeclared, dynamic_sampling=None)
    cut = gradients(batch, objective, 25)
    assert_close(cut, gradients(batch, objective))
    assert selected(batch, objective)[0] == list(range(6))


def test_a_sum_is_not_divided(gradients):
    batch, objective = make_batch(), rl_fn.recipes.dapo()
    total = objective.replace(aggregation=components.Aggregation("token-sum"))
    assert float(total.denominator(batch.mask.numpy())) == 0.0
    tokens = float(batch.mask.sum())
    for micro_batch_tokens in (10**6, 25):
        gradient, metrics = gradients(batch, total, micro_batch_tokens)
        mean_gradient, mean_metrics = gradients(batch, objective, micro_batch_tokens)
        torch.testing.assert_close(gradient, tokens * mean_gradient, rtol=1e-4, atol=1e-5)
        assert metrics["policy_loss"] == pytest.approx(tokens * mean_metrics["policy_loss"], rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("junk", [0.0, NAN, INF])
def test_padding_and_what_lies_there_change_nothing(gradients, monkeypatch, name, junk):
    batch = make_batch()
    wanted = gradients(batch, OBJECTIVES[name])
    assert_close(gradients(widened(batch, 3, junk), OBJECTIVES[name], 1), wanted)
    monkeypatch.setattr(TokenBatch, "trim", lambda self: self)  # the padded columns do reach the model
    assert_close(gradients(widened(batch, 3, junk), OBJECTIVES[name]), wanted)


@pytest.mark.parametrize("name", [*OBJECTIVES, "clip_cov"])
def test_the_order_of_rows_changes_nothing(gradients, name):
    batch, objective = make_batch(), (OBJECTIVES | OVER_BATCH)[name]
    for tokens in (10**6, 25):
        assert_close(
            gradients(batch.rows(torch.tensor([3, 5, 0, 1, 4, 2])), objective, tokens), gradients(batch, objective)
        )


def test_padded_columns_do_not_move_a_token_s_logprob(policies, monkeypatch):
    module = policies(OBJECTIVES["dapo"])
    module.scoring = ScoringConfig(micro_batch_tokens=10**6)
    batch = make_batch()
    monkeypatch.setattr(TokenBatch, "trim", lambda self: self)
    padded = module.token_logprobs(widened(batch, 2, 0.0))
    monkeypatch.undo()
    module.scoring = ScoringConfig(micro_batch_tokens=1)
    alone = module.token_logprobs(batch)
    assert padded.shape[1] == alone.shape[1] + 2 and not padded[:, -2:].any()
    torch.testing.assert_close(padded[:, :-2], alone, rtol=0, atol=1e-6)
    assert bool((alone[batch.mask] < 0).all()) and bool((alone[~batch.mask] == 0).all())
    with torch.no_grad():
        wanted, _ = model_outputs(module.model, batch, 1.0)  # the model itself, unpadded
    torch.testing.assert_close(alone, wanted.masked_fill(~batch.mask, 0.0), rtol=0, atol=1e-5)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    torch.testing.assert_close(module.token_logprobs(batch.rows(order)), alone[order], rtol=0, atol=1e-6)


def model_outputs(model, batch, temperature):
    """Log-probabilities and entropies of the tokens, row by row and unpadded, in plain torch; 0 in the padding."""
    rows, entropies = [], []
    for i, length in enumerate(batch.lengths.tolist()):
        ids = batch.tokens[i : i + 1, :length]
        logp = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        around = 1, batch.tokens.shape[1] - length
        rows.append(torch.nn.functional.pad(logp.gather(-1, ids[0, 1:, None])[:, 0], around))
        entropies.append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), around))
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
    gradient, _ = gradients(batch, rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.1)))
    twice, _ = gradients(batch, rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.2)))
    assert gradient.norm() > 1e-4
    torch.testing.assert_close(twice, 2 * gradient)


def test_a_metric_that_is_only_shown_has_no_gradient(gradients):
    batch = make_batch()
    without = batch._replace(ref_logprobs=None)
    assert_close((gradients(batch, rl_fn.recipes.dapo())[0], {}), (gradients(without, rl_fn.recipes.dapo())[0], {}))


# Neither KL nor entropy, and no dynamic sampling: the rows of the batch without advantage, 2 and 4, have no gradient.
PLAIN = rl_fn.recipes.grpo().replace(kl=None)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"])
def test_leaving_out_rows_without_a_gradient_changes_no_gradient(gradients, mode):
    batch, objective = make_batch(), PLAIN.replace(aggregation=components.Aggregation(mode))
    rows, denominator = selected(batch, objective)
    assert rows == [0, 1, 3, 5]
    few = gradients(batch.rows(torch.tensor(rows)), objective, denominator=denominator)[0]
    torch.testing.assert_close(few, gradients(batch, objective)[0], rtol=1e-4, atol=1e-7)


def test_dynamic_sampling_and_it_alone_takes_groups_out_of_the_denominator():
    batch = make_batch()
    all_tokens, first_group = float(batch.mask.sum()), float(batch.mask[:3].sum())
    plain, dapo = PLAIN.replace(aggregation=components.Aggregation("token-mean")), rl_fn.recipes.dapo()
    assert selected(batch, plain) == [[0, 1, 3, 5], all_tokens]
    assert selected(batch, dapo) == [[0, 1], first_group]
    assert selected(batch, dapo.replace(dynamic_sampling=None)) == [[0, 1, 3, 5], all_tokens]


@pytest.mark.parametrize("name", ["grpo", "entropy"])
def test_with_kl_or_entropy_every_row_has_a_gradient(name):
    objective = OBJECTIVES[name].replace(dynamic_sampling=None)
    assert selected(make_batch(), objective)[0] == list(range(6))


@pytest.mark.parametrize("name", OVER_BATCH)
def test_statistics_of_the_batch_are_of_its_rows_without_advantage_too(name):
    objective = OVER_BATCH[name].replace(dynamic_sampling=None)
    assert selected(make_batch(), objective)[0] == list(range(6))


def test_minibatches_share_what_is_counted():
    computed = torch.tensor([True, False, False, True, True, False, False])
    counted = torch.tensor(
        [[True, True], [True, False], [True, True], [True, True], [True, True], [False] * 2, [True] * 2]
    )
    shares = [(index.tolist(), mask.sum(1).tolist()) for index, _, mask in minibatches_of(computed, counted, 2)]
    assert shares == [([0], [2, 1, 2]), ([3, 4], [2, 2, 2])]
    # The last share has a row that counts and none with a gradient: no update.
    shares = [(index.tolist(), mask.sum(1).tolist()) for index, _, mask in minibatches_of(computed, counted, 3)]
    assert shares == [([0], [2, 1]), ([3], [2, 2]), ([4], [2, 2])]
    assert [index.tolist() for index, *_ in minibatches_of(computed, counted, 9)] == [[0], [3], [4]]


@pytest.mark.parametrize("field", ["old_logprobs", "advantages"])
def test_what_a_step_needs(gradients, field):
    with pytest.raises(ValueError, match=r"train_step needs batch\.old_logprobs and batch\.advantages"):
        gradients(make_batch()._replace(**{field: None}), OBJECTIVES["dapo"])


def test_a_kl_objective_needs_the_reference(gradients):
    with pytest.raises(ValueError, match=r"which needs batch\.ref_logprobs; it is None"):
        gradients(make_batch()._replace(ref_logprobs=None), OBJECTIVES["grpo"])


APART = rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.1))
BY_PROMPT = components.Aggregation("prompt-mean")


@pytest.mark.parametrize(
    "objective",
    [
        rl_fn.recipes.grpo().replace(aggregation=BY_PROMPT),
        APART.replace(entropy_aggregation=BY_PROMPT),
    ],
    ids=["loss", "entropy"],
)
def test_a_mean_over_prompts_is_refused_by_the_module_itself(new_model, objective):
    """A micro-batch would count as one prompt."""
    with pytest.raises(ValueError, match="a micro-batch holds rows of several prompts, so prompt-mean cannot"):
        ready(PolicyModule, new_model(), OptimizerConfig(learning_rate=1e-3), objective, updates=1)


@pytest.mark.parametrize("axis", ["shard", "replicate", "tensor"])
@pytest.mark.parametrize("name", [*OVER_BATCH, "apart", "dapo"])
def test_statistics_of_a_batch_that_is_split_are_refused_where_the_module_is_cut(monkeypatch, new_model, name, axis):
    apart = APART.replace(entropy_aggregation=components.Aggregation("token-mean"))
    objective = {**OVER_BATCH, **OBJECTIVES, "apart": apart}[name]
    module = ready(PolicyModule, new_model(), OptimizerConfig(learning_rate=1e-3), objective, updates=1)
    sizes, cut = {"shard": 1, "replicate": 1, "tensor": 1, axis: 2}, []
    mesh = SimpleNamespace(get_group=lambda one: SimpleNamespace(size=lambda: sizes[one]))
    monkeypatch.setattr(Trainable, "parallelize", lambda module, mesh: cut.append(mesh))
    if name == "dapo" or axis == "tensor":
        module.parallelize(mesh)
        assert cut == [mesh]
    else:
        with pytest.raises(ValueError, match=r"split over 2 workers .*: train it with replicate=1 and shard=1"):
            module.parallelize(mesh)
        assert not cut
