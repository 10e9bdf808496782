from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import RowRequest, SamplingParams
from rl_bridge.engines import InferenceEngine, Mesh
from rl_bridge.environments import Step
from rl_bridge.executors.session import LocalExecutor
from rl_bridge.models.model_source import StateSource
from rl_bridge.rollout import InProcessRollout

SAMPLING = SamplingParams(max_new_tokens=12, n=3, seed=4)
ROWS = [{"prompt": prompt, "_where": f"row {i}"} for i, prompt in enumerate(["1+1=", "7", "12+34=", "98-76+54="])]


class Repeats:
    """Says how many turns there were, and ends after three."""

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return Step(messages=[{"role": "tool", "content": f"-{turns}-"}], reward=1.0, done=turns == 3)


class Nothing(Repeats):
    def step(self, messages):
        return Step()


@pytest.fixture
def model(new_model):
    """Sharper than at its start, and fond of ending its turn."""
    model = new_model(seed=2).requires_grad_(False)
    model.lm_head.weight.mul_(4)
    model.lm_head.weight[1] += 0.35 * model.lm_head.weight[2:].mean(0)
    for weight in model.model.layers.parameters():
        weight.mul_(12 if weight.dim() == 2 else 1)
    return model


@pytest.fixture
def rollout(model, tokenizer):
    return InProcessRollout(StateSource(model), tokenizer)


def requests(places=range(4)):
    return [RowRequest(ROWS[i], (4, i), i) for i in places]


@pytest.mark.parametrize("truncated", [{}, {"temperature": 0.8, "top_k": 5}], ids=["plain", "truncated"])
def test_every_drawn_token_has_the_logprob_of_a_full_forward(rollout, model, truncated):
    made = rollout.converse(requests(), replace(SAMPLING, n=8, **truncated), Repeats, 3)
    found = [t for group in made for t in group]
    assert {t.turns for t in found} >= {1, 2, 3} and {t.finish_reason for t in found} >= {"stop", "length"}
    for t in found:
        logits = model(input_ids=torch.tensor([t.tokens]), use_cache=False).logits[0] / truncated.get("temperature", 1)
        for i, token in enumerate(t.tokens):
            if t.loss_mask[i]:
                allowed = list(t.allowed_tokens[i]) if truncated else slice(None)
                wanted = logits[i - 1, token] - torch.logsumexp(logits[i - 1, allowed], 0)
                np.testing.assert_allclose(t.logprobs[i], float(wanted), atol=2e-5)
    batch = collate(found, 0)
    assert batch.mask.sum() == sum(len(t.sampled_tokens) for t in found)


@pytest.mark.long
def test_batch_and_rows_beside_change_no_conversation(rollout, model, tokenizer):
    wanted = rollout.converse(requests(), SAMPLING, Repeats, 3)
    small = InProcessRollout(StateSource(model), tokenizer, max_batch_rows=2)
    for other in (small.converse(requests(), SAMPLING, Repeats, 3), rollout.converse(requests(), SAMPLING, Repeats, 3)):
        assert [[t.tokens for t in group] for group in other] == [[t.tokens for t in group] for group in wanted]
    chosen = rollout.converse(requests([3, 1]), SAMPLING, Repeats, 3)
    assert [[t.tokens for t in group] for group in chosen] == [[t.tokens for t in wanted[i]] for i in (3, 1)]


def test_the_first_turn_is_what_generate_draws(model, tokenizer):
    with_executor = InferenceEngine(lambda: InProcessRollout(StateSource(model), tokenizer), executor=LocalExecutor())
    engine = with_executor.build(mesh=Mesh())
    generated = engine.generate([row["prompt"] for row in ROWS], SAMPLING)
    found = engine.converse(ROWS, SAMPLING, Nothing, 3)
    assert [t.tokens for t in found] == [t.tokens for t in generated]
    assert [(t.request_id, t.group) for t in found] == [(t.request_id, t.group) for t in generated]
    assert all(t.messages == g.messages for t, g in zip(found, generated, strict=True))
    assert all(t.row == ROWS[t.group] for t in found)
    # An environment that answered without a reward gives none; one that was never asked might have.
    assert {(t.finish_reason, "environment" in t.rewards) for t in found} == {("stop", False), ("length", True)}


def test_an_environment_s_reward_is_in_all_trajectories(model, tokenizer):
    engine = InferenceEngine(lambda: InProcessRollout(StateSource(model), tokenizer), executor=LocalExecutor()).build()
    found = engine.converse(ROWS, SAMPLING, Repeats, 3)
    assert {t.rewards["environment"] for t in found} >= {0.0, 1.0}
    assert all(t.rewards["environment"] == t.turns - (t.finish_reason == "length") for t in found)
    assert engine.converse([], SAMPLING, Repeats, 3) == []


def test_a_time_that_ends_before_it_begins_is_refused(model, tokenizer):
    engine = InferenceEngine(lambda: InProcessRollout(StateSource(model), tokenizer), executor=LocalExecutor()).build()
    with pytest.raises(ValueError, match="seconds must be > 0 or None, got 0"):
        engine.generate(["1+1="], SAMPLING, seconds=0)
    assert {t.finish_reason for t in engine.generate(["1+1="], SAMPLING, seconds=1e-9)} == {"abort"}


def test_a_limit_that_leaves_no_turn_is_refused(rollout):
    with pytest.raises(ValueError, match="a conversation has a turn, and a turn a token: got"):
        rollout.converse([], SAMPLING, Repeats, 0)
