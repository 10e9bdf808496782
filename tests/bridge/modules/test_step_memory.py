"""What a policy step costs beyond its numbers: memory that does not grow with the completions, and little padding."""

import numpy as np
import pytest
import torch

from rl_bridge.data.token_batch import collate, micro_batches, units_of
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.small import TinySource
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.documents import Documents
from rl_fn.objectives.dialects import trl
from tests.kernels.live_bytes import LiveBytes
from tests.support.ready import ready

VOCABULARY, PROMPT, COMPLETION, GROUP = 3000, 8, 24, 8


def make_batch(completions):
    rng = np.random.default_rng(0)
    rows = [
        single_turn([group + 1] * PROMPT, rng.integers(1, VOCABULARY, COMPLETION).tolist(), group=group)
        for group in range(completions // GROUP)
        for _ in range(GROUP)
    ]
    batch = collate(rows, 0)
    old = torch.full(batch.mask.shape, -8.0).masked_fill(~batch.mask, 0.0)
    return batch._replace(old_logprobs=old, advantages=batch.mask.float())


@pytest.fixture(scope="module")
def module():
    model = TinySource(vocabulary=VOCABULARY, hidden=16, layers=2, heads=2).whole()
    return ready(PolicyModule, model, OptimizerConfig(learning_rate=1e-3), trl({}), updates=1)


def peak(module, completions, tokens, **options):
    """The most bytes alive in a step, of tensors made in it."""
    module.scoring = ScoringConfig(micro_batch_tokens=tokens, **options)
    batch = make_batch(completions)
    module.train_step(batch, 1000.0)  # the gradients are there from here on
    with LiveBytes() as alive:
        module.train_step(batch, 1000.0)
    return alive.peak


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"share_prefixes": False}, marks=pytest.mark.slow)], ids=["shared", "apart"]
)
def test_peak_memory_of_a_step_does_not_grow_with_the_completions(module, options):
    few, many = (peak(module, completions, 512, **options) for completions in (64, 512))
    # The batch itself is cut into micro-batches before the first of them is computed.
    data = sum(x.nbytes for x in make_batch(512) if x is not None)
    assert many <= 1.02 * few + data, (few, many, data)
    # The measurement sees what grows: the same completions in one micro-batch.
    assert peak(module, 512, 10**6, **options) > 3 * many


@pytest.mark.parametrize("sharing", [False, True], ids=["packed", "shared"])
def test_micro_batches_are_full(sharing):
    """Lengths as reasoning models have them: log-normal, a few at the limit."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(5.0, 0.8, 1024).astype(int) + 1, 1024)
    prompts = rng.integers(30, 120, 128)
    rows = [
        single_turn([group + 1] * int(prompts[group]), range(row, row + int(length)), group=group)
        for row, length in enumerate(lengths.tolist())
        for group in [row // GROUP]
    ]
    batch, limit = collate(rows, 0), 8192
    parts = micro_batches(batch, limit, packing=True, share_prefixes=sharing)
    tokens = []
    for part in parts:
        of = part.batch
        shared = {"groups": of.groups, "shared": of.prefixes_worth_sharing()} if sharing else {}
        documents = Documents(of.lengths, **shared)
        assert documents.tokens <= limit
        tokens.append(documents.tokens)
    # There is no padding. Of the room in micro-batches, whole groups leave more over than rows do.
    units = units_of(batch.row_tokens(), batch.groups.tolist(), batch.prefixes_worth_sharing().tolist())
    apart, together = int(batch.lengths.sum()), sum(unit.tokens for unit in units)
    assert together < 0.9 * apart
    assert sum(tokens) <= together if sharing else sum(tokens) == apart
    # The last one is what was left over.
    assert sum(sorted(tokens)[1:]) >= (0.9 if sharing else 0.97) * limit * (len(tokens) - 1), tokens
