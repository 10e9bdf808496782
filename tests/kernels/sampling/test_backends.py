"""Every backend: rl_fn's set and log-probabilities, tokens that only seed and position decide, and the edges."""

import pytest
import torch

import rl_fn
from tests.kernels.operations import logits_logprobs, sample
from tests.kernels.registry import backends

INF = float("inf")
BACKENDS = backends("sampling")
DRAWING = pytest.mark.parametrize("backend", BACKENDS)


def normal(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(rows):
    """Different ones a row; every fifth row greedy, some rows without a truncation."""
    g, number = torch.Generator().manual_seed(1), torch.arange(rows)
    return {
        "temperature": (torch.rand(rows, generator=g) + 0.4).masked_fill(number % 5 == 0, 0.0),
        "top_k": torch.randint(1, 40, (rows,), generator=g).masked_fill(number % 3 == 1, 10**6),
        "top_p": (0.3 + 0.65 * torch.rand(rows, generator=g)).masked_fill(number % 4 == 2, 1.0),
        "min_p": (0.05 * torch.rand(rows, generator=g)).masked_fill(number % 2 == 0, 0.0),
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=g),
        "position": torch.randint(0, 2**40, (rows,), generator=g),
    }


def rl_fn_kept(logits, temperature, top_k, top_p, min_p, **_):
    x = rl_fn.temperature(logits.float().numpy(), temperature.numpy())
    x = rl_fn.min_p(rl_fn.top_p(rl_fn.top_k(x, top_k.int().numpy()), top_p.numpy()), min_p.numpy())
    return torch.tensor(x.tolist(), dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [1, 31, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@DRAWING
def test_set_and_log_probabilities_are_rl_fns(backend, dtype, vocabulary):
    logits, options = normal(24, vocabulary, seed=vocabulary).to(dtype), parameters(24)
    logits[3, : vocabulary // 2] = -INF
    result = sample(logits, **options, return_allowed_tokens=True, backend=backend)
    x = rl_fn_kept(logits, **options)
    allowed = x > -INF
    assert result.allowed_tokens is not None
    for row in range(24):
        ids = result.allowed_tokens[row]
        assert ids[ids >= 0].tolist() == allowed[row].nonzero()[:, 0].tolist()
        assert (ids[int(result.allowed_count[row]) :] == -1).all()
    log_p = torch.log_softmax(x, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(~allowed, 0.0)).sum(-1)
    heat = options["temperature"]
    warm = torch.log_softmax(logits.double() / heat.where(heat > 0, 1.0).double()[:, None], -1)
    at = result.tokens[:, None]
    full = warm.gather(1, at)[:, 0].masked_fill(heat == 0, 0.0)
    for got, wanted in ((result.logprobs, log_p.gather(1, at)[:, 0]), (result.entropy, entropy)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(result.full_logprobs.double(), full, rtol=1e-5, atol=4e-6)


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [33, 200])
def test_backends_draw_the_same_tokens(vocabulary):
    logits, options = normal(300, vocabulary), parameters(300)
    wanted = sample(logits, **options, backend="torch")
    for backend in BACKENDS:
        got = sample(logits, **options, backend=backend)
        assert torch.equal(got.tokens, wanted.tokens) and torch.equal(got.allowed_count, wanted.allowed_count)


@pytest.mark.long
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_a_row_does_not_depend_on_its_batch(backend):
    logits, options = normal(23, 90), parameters(23)
    whole = sample(logits, **options, backend=backend)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(2))
    for rows in (order[:7], [0], [13]):
        part = sample(logits[rows], **{n: v[rows] for n, v in options.items()}, backend=backend)
        for a, b in zip(part[:5], whole[:5], strict=True):
            assert a is not None and b is not None and torch.equal(a, b[rows])


def test_chunks_change_nothing(monkeypatch):
    import importlib

    logits, options = normal(23, 150), parameters(23)
    whole = sample(logits, **options, backend="torch")
    monkeypatch.setattr(importlib.import_module("rl_kernels.sampling.torch"), "_CHUNK", 300)
    for a, b in zip(sample(logits, **options, backend="torch")[:5], whole[:5], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.long
def test_one_row_a_program_as_on_a_gpu(monkeypatch):
    import importlib

    logits, options = normal(5, 70), parameters(5)
    whole = sample(logits, **options, backend="triton")
    monkeypatch.setattr(importlib.import_module("rl_kernels.sampling.triton"), "_BLOCK_M", 1)
    for a, b in zip(sample(logits, **options, backend="triton")[:5], whole[:5], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [1025, 50257])
def test_a_real_vocabulary(vocabulary):
    """Up to 50 tiles of 1024, the last one ragged; strided rows."""
    logits = normal(6, vocabulary)[::3]
    options = {"temperature": 0.8, "seed": torch.tensor([1, 2]), "position": 9}
    for more in ({}, {"min_p": 0.01}, {"top_k": 1}):
        wanted, got = (sample(logits, **options, **more, backend=backend) for backend in ("torch", "triton"))
        assert torch.equal(got.tokens, wanted.tokens) and torch.equal(got.allowed_count, wanted.allowed_count)
        torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)


@DRAWING
def test_greedy_is_the_lowest_id_of_the_largest(backend):
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [-INF, -INF, 0.0, -INF], [-0.0, 0.0, -1.0, 0.0]])
    result = sample(logits, temperature=0.0, seed=1, position=2, return_allowed_tokens=True, backend=backend)
    assert result.tokens.tolist() == [1, 2, 0] and result.allowed_tokens is not None
    assert result.logprobs.tolist() == result.full_logprobs.tolist() == result.entropy.tolist() == [0.0] * 3
    assert result.allowed_tokens.tolist() == [[1], [2], [0]]


@DRAWING
def test_ties_are_cut_by_id(backend):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    common = {"seed": 0, "position": torch.tensor([0]), "return_allowed_tokens": True, "backend": backend}
    for options, allowed in (
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [0, 1, 2, 4]),
        ({"top_p": 0.45}, [1, 2]),
        ({"top_p": 0.8}, [0, 1, 2, 4]),
        ({"top_k": 5, "top_p": 0.9}, [0, 1, 2, 4]),
        ({"min_p": 0.5}, [1, 2, 4]),
        ({"top_k": 2, "min_p": 0.5}, [1, 2]),
    ):
        result = sample(logits, **options, **common)
        assert result.allowed_tokens is not None and result.allowed_tokens.tolist() == [allowed], options


@DRAWING
def test_a_row_of_nothing_has_no_token(backend):
    logits = torch.full((3, 40), -INF)
    logits[1, 7] = 0.0
    options = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    for heat in (0.0, 1.0):
        for more in ({}, options):
            result = sample(
                logits, temperature=heat, **more, seed=0, position=0, return_allowed_tokens=True, backend=backend
            )
            assert result.tokens.tolist() == [-1, 7, -1] and result.allowed_count.tolist() == [0, 1, 0]
            assert result.logprobs.tolist() == result.full_logprobs.tolist() == [-INF, 0.0, -INF]
            assert result.entropy.tolist() == [0.0] * 3 and result.allowed_tokens is not None
            assert result.allowed_tokens.tolist() == [[-1], [7], [-1]]


@DRAWING
def test_the_trainers_log_probability_is_the_samplers(backend):
    logits, options = normal(40, 90), parameters(40)
    options["temperature"] = options["temperature"].clamp(min=0.3)
    result = sample(logits, **options, return_allowed_tokens=True, backend=backend)
    heat = options["temperature"]
    trained = logits_logprobs(logits, result.tokens, temperature=heat, allowed_tokens=result.allowed_tokens)
    torch.testing.assert_close(trained.logprobs, result.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(trained.entropy, result.entropy, rtol=0, atol=1e-5)
    full = logits_logprobs(logits, result.tokens, temperature=heat)
    torch.testing.assert_close(full.logprobs, result.full_logprobs, rtol=0, atol=1e-5)
