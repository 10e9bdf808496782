"""FlashInfer and aiter draw from the kept set that is ours: the log-probability is that of what they drew from."""

import pytest
import torch

from tests.kernels.cases import INF, normal
from tests.kernels.experimental.stand_ins import install, random_sample_outer_exponential, sampling_from_logits
from tests.kernels.operations import logits_logprobs, sample

B, V = 40, 37
OPTIONS = {"top_k": 6, "top_p": 0.9, "min_p": 0.01}


@pytest.fixture
def calls(monkeypatch):
    made = []
    install(monkeypatch, "flashinfer", "flashinfer.sampling", sampling_from_logits=sampling_from_logits(made))
    return made


@pytest.fixture
def aiter_calls(monkeypatch):
    made = []
    function = random_sample_outer_exponential(made)
    install(monkeypatch, "aiter", "aiter.ops.sample", random_sample_outer_exponential=function)
    return made


@pytest.fixture
def logits():
    x = normal(B, V).float()
    x[3, 5:] = -INF
    x[4] = -INF
    return x


def temperatures():
    heat = torch.linspace(0.5, 2.0, B)
    heat[::8] = 0.0
    return heat


@pytest.mark.parametrize("backend", ["flashinfer", "aiter"])
def test_the_log_probability_is_that_of_what_was_drawn_from(calls, aiter_calls, logits, backend):
    heat, seeds, places = temperatures(), torch.arange(B) * 7 - 9, torch.arange(B)
    options = {"temperature": heat, "seed": seeds, "position": places, "return_allowed_tokens": True, **OPTIONS}
    got, ours = sample(logits, **options, backend=backend), sample(logits, **options, backend="torch")
    # Greedy rows and the row without an entry are not drawn.
    still = (heat == 0) | (torch.arange(B) == 4)
    for a, b in zip(got[:5], ours[:5], strict=True):
        assert torch.equal(a[still], b[still])
    assert (
        got.allowed_tokens is not None
        and ours.allowed_tokens is not None
        and torch.equal(got.allowed_tokens, ours.allowed_tokens)
    )
    assert got.tokens.dtype == torch.int64
    assert torch.equal(got.entropy, ours.entropy) and torch.equal(got.allowed_count, ours.allowed_count)
    assert (got.tokens != ours.tokens).any() and (got.allowed_tokens == got.tokens[:, None]).any(-1)[~still].all()
    drawn = heat.where(heat > 0, 1.0)
    allowed = logits_logprobs(
        logits, got.tokens.clamp(min=0), allowed_tokens=got.allowed_tokens, temperature=drawn
    ).logprobs
    full = logits_logprobs(logits, got.tokens.clamp(min=0), temperature=drawn).logprobs
    torch.testing.assert_close(got.logprobs[~still], allowed[~still], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.full_logprobs[~still], full[~still], rtol=1e-5, atol=1e-5)


def test_flashinfer_gets_finite_rows_and_a_stream_for_each_seed_and_position(calls, logits):
    seeds = torch.tensor([1, 1, 2, 1]).repeat(B // 4)
    places = torch.tensor([0, 1, 0, 2**40]).repeat(B // 4)
    sample(logits, temperature=0.5, seed=seeds, position=places, **OPTIONS, backend="flashinfer")
    ((x, streams, offset),) = calls
    assert x.dtype == torch.float32 and (x > -INF).any(-1).all() and ((x > -INF).sum(-1) <= 6)[5:].all()
    assert streams.dtype == offset.dtype == torch.int64 and streams.shape == offset.shape == (B,)
    assert len(set(streams[:4].tolist())) == 4 and torch.equal(streams[:4], streams[4:8]) and not offset.any()


def test_aiter_gets_our_noise_and_no_epsilon(aiter_calls, logits):
    """So a token does not depend on the rows beside it."""
    options = {"temperature": 1.3, **OPTIONS, "backend": "aiter"}
    whole = sample(logits, seed=torch.arange(B), position=5, **options)
    alone = sample(logits[7:8], seed=7, position=5, **options)
    assert torch.equal(whole.tokens[7:8], alone.tokens)
    x, noise, temperatures, eps = aiter_calls[0]
    assert x.isfinite().all() and x.shape == (B, 40) and (temperatures == 1).all() and eps == 0
    # Exponential with mean 1, from as many numbers as there are entries.
    assert noise[:, :V].min() > 0 and abs(noise[:, :V].mean() - 1) < 5 / (B * V) ** 0.5


def test_draws_follow_the_kept_distribution(calls, aiter_calls):
    row = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    draws = 3000
    for backend in ("flashinfer", "aiter"):
        result = sample(row.expand(draws, 5), top_k=3, seed=torch.arange(draws), position=0, backend=backend)
        p = torch.softmax(row[0], 0)[[0, 1, 4]]
        p = p / p.sum()
        counts = torch.bincount(result.tokens, minlength=5)[[0, 1, 4]]
        assert counts.sum() == draws
        chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum()
        assert chi2 < 18, f"{backend}: {chi2} with two degrees of freedom"
