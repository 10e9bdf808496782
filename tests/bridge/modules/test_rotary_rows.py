"""A row's numbers do not depend on the rows beside it, with the rotary kinds that look at the longest of them."""

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.row_checks import Fits
from rl_bridge.models.small import character_tokenizer
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.parallel.probe import plain_values, with_attention
from tests.support.attending_models import SIZES, tiny
from tests.support.ready import ready

LIMIT = 24
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}


def longrope():
    config = Phi3Config(
        **SIZES | {"max_position_embeddings": 4 * LIMIT},
        original_max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    return model


def dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return tiny("Llama", max_position_embeddings=LIMIT + 1, rope_parameters=rope)


@pytest.mark.parametrize("make", [longrope, dynamic])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_within_the_bound_are_those_of_rows_alone_and_longer_ones_are_refused(make, packing):
    """ROLL-3, MUSB-3: a row of 10 tokens was off by 3.9 nats beside one beyond the limit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    scorer = ready(TokenScorer, model, ScoringConfig(packing=packing))
    rows = [single_turn([5, 6, 7], [3 + row] * tokens, group=row) for row, tokens in enumerate((2, 9, LIMIT - 3))]
    found = scorer.token_logprobs(collate(rows, 0))
    with with_attention(scorer.model, "eager"), torch.no_grad():
        for row, trajectory in enumerate(rows):
            alone = plain_values(scorer.model, torch.tensor(trajectory.tokens))
            torch.testing.assert_close(found[row, 3 : len(alone) + 1], alone[2:], rtol=0, atol=3e-5)
    longer = [*rows, single_turn([5, 6, 7], [8] * (LIMIT - 2), group=9)]
    with pytest.raises(ValueError, match=rf"a row has {LIMIT + 1} tokens: .*ForCausalLM .* beyond {LIMIT} tokens"):
        scorer.token_logprobs(collate(longer, 0))


def test_rows_are_held_against_the_bound_before_training():
    tokenizer = character_tokenizer("0123456789+=")
    fits = Fits(longrope(), tokenizer, new_tokens=4)
    fits.require_tokens([3] * (LIMIT - 4))
    with pytest.raises(ValueError, match=rf"{LIMIT - 3} tokens and 4 are sampled behind; beyond {LIMIT} tokens"):
        fits.require_tokens([3] * (LIMIT - 3))
