"""What a batch is filled up with is read nowhere, whichever token it is (S4, S6, L18, pad = eos anywhere)."""

import copy

import pytest
import torch

from rl_bridge.data.comparisons import collate_comparisons
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.encoding import encode_row
from rl_bridge.modules.comparison import ComparisonLoss, PreferenceModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.lora_families import tiny
from tests.support.ready import ready

END, INSIDE = 1, 4
# The end stands in a prompt too, and one completion is the end alone.
ROWS = [single_turn([2, 3, END, 4, 5, 6], [7, 8, END]), single_turn([6, 4], [END]), single_turn([5], [4, 4, END])]
PADS = (0, END, INSIDE)
RATE = OptimizerConfig(learning_rate=1e-3)
PADDED = ScoringConfig(packing=False, share_prefixes=False)


def supervised(model, rows, pad):
    """The gradient and the log-probability of each token that counts, of rows filled up with ``pad``."""
    module = ready(SupervisedModule, copy.deepcopy(model), RATE, updates=1, scoring=PADDED)
    batch = collate(rows, pad)
    assert all(bool(batch.mask[i, len(row.tokens) - 1]) for i, row in enumerate(rows)), "the end is a target"
    scores = module.token_logprobs(batch)[batch.mask]
    module.train_step(batch, 7.0)
    return scores, torch.cat([p.grad.flatten() for p in module.model.parameters()])


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_supervision_and_scores_are_those_of_rows_alone(family):
    """With convolutions beside the attention too: nothing is filled up on the left."""
    model = tiny(family)
    alone = [supervised(model, [row], 0) for row in ROWS]
    scores, gradient = torch.cat([a for a, _ in alone]), sum(b for _, b in alone)
    for pad in PADS:
        found = supervised(model, ROWS, pad)
        torch.testing.assert_close(found[0], scores, rtol=0, atol=5e-5)
        torch.testing.assert_close(found[1], gradient, rtol=1e-3, atol=5e-5)


def test_comparisons_have_the_ends_of_their_completions():
    module = ready(
        PreferenceModule, tiny("llama"), RATE, ComparisonLoss(name="dpo", constants={}), updates=1, scoring=PADDED
    )
    batches = [collate_comparisons([ROWS[:2], ROWS[1:]], pad) for pad in PADS]
    first, *others = (module.completion_logprobs(batch) for batch in batches)
    assert batches[0].counted().tolist() == [[3, 1], [1, 3]] and first.abs().min() > 0
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=5e-5)


def test_a_row_s_end_counts_where_the_tokenizer_pads_with_it(tokenizer):
    row, same = {"prompt": "1+1=", "answer": "2"}, copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    rows = [encode_row(t, row) for t in (tokenizer, same)]
    assert rows[0] == rows[1] and rows[0].tokens[-1] == tokenizer.eos_token_id and rows[0].loss_mask[-1]
