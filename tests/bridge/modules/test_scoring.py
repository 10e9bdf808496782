"""Policy, old policy and reference are one distribution until the first update, however tokens are scored."""

import pytest
import torch

import rl_fn
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.ready import ready
from tests.support.trajectories import random_batch


def reference_of(module):
    """A frozen copy of the module's weights, scored as the module is."""
    return ready(TokenScorer, module.model, module.scoring)


SCORINGS = [
    ScoringConfig(),
    ScoringConfig(temperature=0.3, micro_batch_tokens=20),
    ScoringConfig(temperature=1.7, micro_batch_tokens=1),
    ScoringConfig(temperature=0.7, softcap=0.5),
    ScoringConfig(temperature=0.7, dtype="bfloat16", micro_batch_tokens=30),
]


def make_batch(rows=5):
    batch = random_batch(rows, seed=4)
    return batch._replace(advantages=torch.randn(rows, 1, generator=torch.Generator().manual_seed(4)) * batch.mask)


@pytest.fixture(scope="module")
def objective():
    """One for all scorings; it has every term that compares two policies."""
    return rl_fn.recipes.grpo()


@pytest.fixture
def policy(new_model, objective):
    def make(scoring):
        return ready(
            PolicyModule, new_model(3), OptimizerConfig(learning_rate=0.1), objective, updates=9, scoring=scoring
        )

    return make


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_kl_to_an_identical_reference_is_exactly_zero_and_has_no_gradient(policy, objective, scoring):
    module, batch = policy(scoring), make_batch()
    old, ref = module.token_logprobs(batch), reference_of(module).token_logprobs(batch)
    assert torch.equal(old, ref) and bool((old[batch.mask] < 0).all())
    batch = batch._replace(old_logprobs=old, ref_logprobs=ref)
    denominator = float(objective.denominator(batch.mask.numpy()))
    metrics = {name: mean(value) for name, value in module.train_step(batch, denominator).items()}
    assert metrics["kl"] == 0.0 and metrics["ratio_mean"] == 1.0
    module.zero_grad()
    module.train_step(batch._replace(advantages=torch.zeros_like(old)), denominator)
    assert not any(p.grad.any() for p in module.model.parameters())


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_scores_are_those_of_the_formula(policy, scoring):
    module, batch = policy(scoring), make_batch()
    scores = module.token_logprobs(batch)
    for i, length in enumerate(batch.lengths.tolist()):
        ids = batch.tokens[i : i + 1, :length]
        logits = module.model(input_ids=ids).logits[0, :-1].detach()
        if scoring.softcap is not None:
            logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
        wanted = (logits / scoring.temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found = scores[i][batch.mask[i]]
        torch.testing.assert_close(
            found, wanted[batch.mask[i, 1:length]], rtol=0, atol=5e-2 if scoring.dtype != "float32" else 1e-5
        )
    assert scores.dtype == torch.float32
    exact = reference_of(module)
    exact.scoring = ScoringConfig(temperature=scoring.temperature, softcap=scoring.softcap)
    assert torch.allclose(exact.token_logprobs(batch), scores, rtol=0, atol=1e-5) == (scoring.dtype == "float32")


def test_a_caller_s_autocast_changes_no_score(policy):
    module, batch = policy(ScoringConfig()), make_batch()
    wanted = module.token_logprobs(batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.token_logprobs(batch), wanted)


def test_dropout_does_not_part_a_policy_from_its_reference(policy):
    module = policy(ScoringConfig())
    assert not any(part.training for part in module.model.modules())


def test_a_reference_stays_where_it_was_made_and_has_no_optimiser(policy):
    module, batch = policy(ScoringConfig()), make_batch()
    reference = reference_of(module)
    assert type(reference) is TokenScorer and reference.scoring is module.scoring
    assert not any(p.requires_grad for p in reference.parameters()) and all(
        p.requires_grad for p in module.parameters()
    )
    assert reference.checkpoint_state().keys() == {"model", "version"}
    before = reference.token_logprobs(batch)
    module.train_step(batch._replace(old_logprobs=before, ref_logprobs=before), float(batch.mask.sum()))
    module.optimizer_step()
    assert torch.equal(reference.token_logprobs(batch), before)
    assert not torch.equal(module.token_logprobs(batch), before)

    other = reference_of(module)
    other.load_checkpoint_state(reference.checkpoint_state())
    assert torch.equal(other.token_logprobs(batch), before)
    for device in ("meta", "cpu"):
        other.move("weights", torch.device(device))
        with pytest.raises(ValueError, match="TokenScorer has no 'optimizer' to move; it has weights"):
            other.move("optimizer", torch.device(device))
    with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
        other.token_logprobs(batch)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": -1.0}, {"micro_batch_tokens": 0}, {"softcap": 0.0}]
)
def test_no_distribution_is_scored_so(options):
    with pytest.raises(ValueError, match="need temperature > 0, micro_batch_tokens > 0 and softcap > 0 or None"):
        ScoringConfig(**options)
    with pytest.raises(ValueError, match="dtype is one of float32, bfloat16, got 'float16'"):
        ScoringConfig(dtype="float16")
