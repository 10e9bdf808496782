"""What is drawn follows the exact distribution, for every truncation and both drawing backends."""

import importlib

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import rl_fn
from tests.kernels.operations import sample

OPTIONS = {
    "temperature": {"temperature": 1.7},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


def exact(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Probabilities in float64 over the set that rl_fn keeps."""
    x = rl_fn.temperature(logits.numpy(), temperature)
    x = x if top_k is None else rl_fn.top_k(x, top_k)
    x = x if top_p is None else rl_fn.top_p(x, top_p)
    x = np.asarray(x if min_p is None else rl_fn.min_p(x, min_p), np.float64)
    p = np.exp(x - x.max())
    return p / p.sum()


@pytest.mark.parametrize(
    ("backend", "draws", "name"),
    # Triton is held to torch's very tokens, with every truncation (test_backends.py).
    [("torch", 50_000, name) for name in OPTIONS] + [("triton", 20_480, "temperature")],
)
def test_chi_square(monkeypatch, backend, draws, name):
    """Three tiles of 32. Cells with fewer than five expected draws are one cell."""
    options = OPTIONS[name]
    if backend == "triton":
        # The interpreter's price is by the program.
        monkeypatch.setattr(importlib.import_module("rl_kernels.sampling.triton"), "_BLOCK_M", 4096)
    logits = 1.5 * torch.randn(70, generator=torch.Generator().manual_seed(4))
    # One seed at many positions, and many seeds at one position.
    counted = torch.arange(draws)
    seed, position = torch.where(counted % 2 == 0, 2**62 + 3, counted), torch.where(counted % 2 == 0, counted, 2**40)
    result = sample(logits.expand(draws, -1), **options, seed=seed, position=position, backend=backend)
    found = np.bincount(result.tokens.numpy(), minlength=70)
    p = exact(logits, **options)
    assert (found[p == 0] == 0).all()
    assert (result.allowed_count == (p > 0).sum()).all()
    expected = p * draws
    big = expected >= 5
    observed, expected = (np.append(v[big], v[~big & (p > 0)].sum()) for v in (found, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert 1e-4 < chi2.sf(statistic, len(expected) - 1) < 1 - 1e-4


def test_positions_of_a_seed_are_independent():
    """Neighbouring draws of a fair coin agree half of the time."""
    tokens = sample(torch.zeros(40_000, 2), seed=5, position=torch.arange(40_000)).tokens
    agree = (tokens[1:] == tokens[:-1]).double().mean()
    assert abs(agree - 0.5) < 4 * 0.5 / 200
