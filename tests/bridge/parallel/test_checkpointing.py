"""Gradient checkpointing in one process: layers run twice, in evaluation mode too, and gradients are the same."""

import pytest
import torch
from torch import nn

from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.parallelize import parallelize
from tests.support.one_step import loss_of, make, token_ids


def gradients(checkpointed):
    model, runs = make("Qwen3"), []
    parallelize(model, None, ParallelConfig(activations="full" if checkpointed else "keep"))
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    logits = model(input_ids=token_ids(), use_cache=False).logits
    forward = len(runs)
    loss_of(logits, token_ids()).backward()
    return {name: p.grad for name, p in model.named_parameters()}, forward, len(runs)


def test_layers_run_again_in_the_backward_pass():
    plain, *plain_runs = gradients(False)
    again, *again_runs = gradients(True)
    assert (plain_runs, again_runs) == ([1, 1], [1, 2])
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_module_without_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no layers to checkpoint"):
        parallelize(nn.Linear(2, 2), None, ParallelConfig(activations="full"))
