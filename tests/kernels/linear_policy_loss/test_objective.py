"""rl_fn's objectives on the head: loss, metrics and gradients of the plain way, whose logits are whole."""

import pytest
import torch

import rl_fn
from rl_bridge.functional import from_jax
from tests.kernels.operations import linear_policy_loss

B, T, H, V = 3, 6, 16, 53
EXTRA = {"kl": rl_fn.components.KL("k3", 0.1), "entropy": rl_fn.components.EntropyBonus(0.01)}
# Blocks of two rows.
WORKSPACE = 4 * 1250


def problem():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (0.7 * torch.randn(*shape, generator=g) for shape in ((B, T, H), (V, H)))
    tokens = torch.randint(V, (B, T), generator=g)
    mask = torch.arange(T) < torch.tensor([6, 3, 4])[:, None]
    now = torch.log_softmax(hidden @ weight.T, -1).gather(-1, tokens[..., None])[..., 0]
    old, reference = now + 0.3 * torch.randn(2, B, T, generator=g)
    fields = {"old_logprobs": old, "ref_logprobs": reference, "advantages": torch.randn(B, T, generator=g)}
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, fields | {"mask": mask}


def plain(objective, hidden, weight, tokens, fields):
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    drawn = log_p.gather(-1, tokens[..., None])[..., 0]
    ratio, metrics = from_jax(objective.parts)(rl_fn.Batch(drawn, entropies=-(log_p.exp() * log_p).sum(-1), **fields))
    return ratio.total / objective.denominator(fields["mask"].numpy()).item(), metrics


def assert_same(objective, loss, **options):
    hidden, weight, tokens, fields = problem()
    total, metrics = linear_policy_loss(hidden, weight, tokens, loss, mask=fields["mask"], **options)
    wanted, wanted_metrics = plain(objective, hidden, weight, tokens, fields)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (total, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    return metrics, wanted_metrics


@pytest.mark.parametrize("recipe", ["dapo", "ppo"])
def test_fused_a_block_of_rows_at_a_time(recipe):
    """Means over tokens: undivided parts of the blocks, over a denominator that is known before. Metrics add up."""
    objective = getattr(rl_fn.recipes, recipe)().replace(**EXTRA)
    fields = problem()[3]
    parts, count = from_jax(objective.parts), fields["mask"].sum()

    def loss(logprobs, entropy, logsumexp, rows):
        cut = {name: x.reshape(-1)[rows] for name, x in fields.items()}
        ratio, metrics = parts(rl_fn.Batch(logprobs, entropies=entropy, **cut))
        return ratio.total / count, metrics

    metrics, wanted = assert_same(objective, loss, fused=True, workspace=WORKSPACE)
    assert metrics.keys() == wanted.keys() and {"kl", "entropy", "clip_fraction"} <= metrics.keys()
    for name, theirs in wanted.items():
        torch.testing.assert_close(metrics[name], rl_fn.Ratio(*(x.detach() for x in theirs)), rtol=1e-4, atol=1e-4)


def test_grpo_divides_each_response_by_its_length():
    """Unfused the recipe sees whole responses; fused, each token brings its weight 1/(B · length)."""
    objective = rl_fn.recipes.grpo().replace(**EXTRA)
    fields = problem()[3]
    mask = fields["mask"]
    parts = from_jax(objective.parts)
    per_token = from_jax(
        lambda b: (
            objective.loss(b) + objective.kl.coef * objective.kl.estimate(b) - objective.entropy.coef * b.entropies
        )
    )
    weights = (mask / mask.sum(-1, keepdim=True) / B).reshape(-1)

    def whole(logprobs, entropy, logsumexp, rows):
        ratio, metrics = parts(rl_fn.Batch(logprobs.view(B, T), entropies=entropy.view(B, T), **fields))
        return ratio.total / B, metrics

    def local(logprobs, entropy, logsumexp, rows):
        cut = {name: x.reshape(-1)[rows] for name, x in fields.items()}
        return (per_token(rl_fn.Batch(logprobs, entropies=entropy, **cut)) * weights[rows]).sum()

    assert_same(objective, whole)
    assert_same(objective, local, fused=True, workspace=WORKSPACE)


def test_a_recipe_of_sequence_ratios_is_refused():
    hidden, weight, tokens, fields = problem()
    parts = from_jax(rl_fn.recipes.gspo().parts)

    def loss(logprobs, entropy, logsumexp, rows):
        cut = {name: x.reshape(-1)[rows] for name, x in fields.items()}
        return parts(rl_fn.Batch(logprobs, **cut))[0].total

    with pytest.raises(ValueError, match="rows of the loss interact"):
        linear_policy_loss(hidden, weight, tokens, loss, mask=fields["mask"], fused=True)
