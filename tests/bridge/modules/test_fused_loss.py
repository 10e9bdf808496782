"""The loss in the head: the same gradients and metrics, for losses that are a sum over tokens, and no others."""

from dataclasses import replace

import pytest
import torch

import rl_fn
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.policy import PolicyModule, require_token_local
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_fn import components
from tests.bridge.modules.shared_prompts import APART, make_batch, step
from tests.support.ready import ready

OBJECTIVE = rl_fn.recipes.dapo().replace(
    kl=components.KL("k3", 0.1), entropy=components.EntropyBonus(0.1), correction=components.TIS(1.1)
)
SCORINGS = {
    "padded": APART,
    "packed": replace(APART, packing=True, temperature=0.7, softcap=3.0),
    "shared": replace(APART, share_prefixes=True),
    "micro-batches": replace(APART, share_prefixes=True, micro_batch_tokens=30),
}


@pytest.fixture(scope="module")
def modules(tokenizer):
    model, optimizer = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2), OptimizerConfig(learning_rate=1e-3)
    return [ready(PolicyModule, model, optimizer, OBJECTIVE, updates=1, fused_loss=fused) for fused in (False, True)]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradients_and_metrics_are_those_of_two_passes(modules, scoring):
    batch = make_batch()
    allowed = torch.stack([batch.tokens, (batch.tokens + 1) % 15, (batch.tokens + 4) % 15], -1)
    for given in (batch, batch._replace(allowed_tokens=allowed)):
        (wanted, metrics), (gradient, found) = (step(module, SCORINGS[scoring], given) for module in modules)
        assert wanted.norm() > 1e-3
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_losses_whose_tokens_interact_are_refused_by_name(tokenizer):
    recipes = {name: getattr(rl_fn.recipes, name)() for name in ("dapo", "cispo", "gspo", "clip_cov")}
    recipes["sequence means"] = recipes["dapo"].replace(aggregation=components.Aggregation("seq-mean-token-mean"))
    taken = []
    for name, objective in recipes.items():
        try:
            require_token_local(objective)
            taken.append(name)
        except ValueError as error:
            assert f"that of {objective.name} does" in str(error)
    assert taken == ["dapo", "cispo"]
    with pytest.raises(ValueError, match="that of gspo does"):
        ready(
            PolicyModule,
            tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2),
            OptimizerConfig(learning_rate=1e-3),
            recipes["gspo"],
            updates=1,
            scoring=ScoringConfig(),
            fused_loss=True,
        )
