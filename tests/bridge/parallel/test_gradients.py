"""Clipping and agreement in one process; over several: test_layouts.py, test_bfloat16.py."""

import math

import pytest
import torch
from torch import nn

from rl_bridge.parallel.mesh import agree_max, clip_grad_norm


def parameters(*gradients):
    made = []
    for gradient in gradients:
        made.append(nn.Parameter(torch.zeros(() if gradient is None else gradient.shape)))
        made[-1].grad = None if gradient is None else gradient.clone()
    return made


def test_it_is_torchs_own_clipping():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 4, generator=generator), None, torch.randn(5, generator=generator)]
    for max_norm in (0.5, 100.0):
        ours, theirs = parameters(*gradients), parameters(*gradients)
        norm = clip_grad_norm(ours, max_norm, None)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
        for a, b in zip(ours, theirs, strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)


def test_a_tied_parameter_counts_once():
    (weight,) = parameters(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm([weight, weight], 10.0, None) == 5.0


def test_gradients_in_half_precision_are_summed_in_float32():
    (weight,) = parameters(torch.full((4096,), 1.0))
    weight.data, weight.grad = weight.data.bfloat16(), weight.grad.bfloat16()
    assert clip_grad_norm([weight], 1e9, None) == 64.0
    (weight,) = parameters(torch.full((1000,), 1e-3))
    weight.data, weight.grad = weight.data.half(), weight.grad.half()
    torch.testing.assert_close(
        clip_grad_norm([weight], 1e9, None), torch.tensor(1e-3 * math.sqrt(1000)), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows(value):
    norm = clip_grad_norm(parameters(torch.tensor([1.0, value])), 1.0, None)
    assert not torch.isfinite(norm)


def test_without_gradients_the_norm_is_zero_and_without_parameters_there_is_none():
    assert clip_grad_norm(parameters(None), 1.0, None) == 0.0
    with pytest.raises(ValueError, match="no parameters"):
        clip_grad_norm([], 1.0, None)


def test_one_worker_agrees_with_itself():
    assert agree_max(3, None) == 3
    assert agree_max(2.5, None) == 2.5
