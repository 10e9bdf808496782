import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.requests import SamplingParams
from rl_bridge.rollout.token_sampler import request_seeds, token_sampler, uniform_numbers
from tests.bridge.rollout.distribution import truncated

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -float("inf"), 1.9, -3.0])
LARGEST = 1 - 2.0**-53
OF_SEED_7 = [[-6926128240174096792, 8764810008325594656], [1744542734435812199, 4175027301406484995]]


def ids(seed, prompts):
    return [(seed, place) for place in range(prompts)]


def params(**options):
    return SamplingParams(max_new_tokens=1, **options)


TRUNCATIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 5, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("options", TRUNCATIONS)
def test_frequencies_are_those_of_the_truncated_distribution(options):
    count = 100_000
    p = truncated(LOGITS, **options)
    uniforms = uniform_numbers(request_seeds([(11, 0)], count, CPU)[0], 0)
    tokens, logprobs = token_sampler(params(**options))(LOGITS.expand(count, -1), uniforms)
    np.testing.assert_allclose(logprobs.numpy(), np.log(p[tokens.numpy()]), atol=1e-6)
    observed = np.bincount(tokens.numpy(), minlength=len(p))
    assert not observed[p == 0].any()
    assert scipy.stats.chisquare(observed[p > 0], count * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("options", TRUNCATIONS)
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST])
def test_the_ends_of_the_unit_interval_sample_tokens_of_positive_probability(options, uniform):
    for logits in (LOGITS, LOGITS.flip(0), torch.tensor([-float("inf"), 0.0, -float("inf")])):
        sample = token_sampler(params(**options))
        tokens, logprobs = sample(logits[None], torch.tensor([uniform], dtype=torch.float64))
        assert truncated(logits, **options)[tokens[0]] > 0 and bool(torch.isfinite(logprobs[0]))


@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=30),
    uniform=st.sampled_from([0.0, LARGEST]) | st.floats(0, LARGEST),
)
def test_no_logits_lead_out_of_the_vocabulary(logits, uniform):
    tokens, logprobs = token_sampler(params())(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64))
    assert 0 <= int(tokens) < len(logits)
    assert float(logprobs) <= 0


def test_greedy_is_the_argmax_with_probability_one():
    rows = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(7)])
    tokens, logprobs = token_sampler(params(temperature=0.0))(rows, torch.full((3,), 0.9, dtype=torch.float64))
    assert tokens.tolist() == [2, 4, 0] and logprobs.tolist() == [0.0, 0.0, 0.0]


def test_half_precision_logits_are_sampled_in_float32():
    _, logprobs = token_sampler(params())(LOGITS[None].bfloat16(), torch.tensor([0.5], dtype=torch.float64))
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("position", [0, 1, 1000])
def test_numbers_are_uniform_in_the_unit_interval_over_seeds(position):
    numbers = uniform_numbers(request_seeds(ids(3, 100), 200, CPU).reshape(-1), position).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_numbers_are_uniform_and_uncorrelated_over_positions():
    seeds = request_seeds([(0, 0)], 2, CPU)[0]
    first, second = torch.stack([uniform_numbers(seeds, position) for position in range(4000)]).numpy().T
    assert scipy.stats.kstest(first, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06


def test_the_numbers_have_53_bits():
    numbers = uniform_numbers(torch.arange(-50_000, 50_000), 0)
    assert numbers.dtype == torch.float64 and len(numbers.unique()) == 100_000
    assert bool((numbers * 2.0**53 == (numbers * 2.0**53).round()).all())


@given(seed=st.integers(-(2**70), 2**70), prompts=st.integers(1, 6), samples=st.integers(1, 6))
def test_a_seed_belongs_to_its_prompt_and_sample_and_not_to_their_number(seed, prompts, samples):
    seeds = request_seeds(ids(seed, 6), 6, CPU)
    assert torch.equal(request_seeds(ids(seed, prompts), samples, CPU), seeds[:prompts, :samples])
    assert len(seeds.unique()) == 36


def test_a_seed_belongs_to_its_id_whatever_stands_beside_it():
    several = [(5,), (5, 0), (5, 0, 0), (5, 1), (-5, 1)]
    seeds = request_seeds(several, 3, CPU)
    assert len(seeds.unique()) == 15
    for id, row in zip(several, seeds, strict=True):
        assert torch.equal(request_seeds([(9, 9), id], 3, CPU)[1], row)
    with pytest.raises(ValueError, match=r"a request needs an id of at least one number, got \[\(1,\), \(\)\]"):
        request_seeds([(1,), ()], 1, CPU)


def test_the_seeds_of_runs_until_now_stay_as_they_were():
    assert request_seeds([(7, 0), (7, 3)], 2, CPU).tolist() == OF_SEED_7


def test_neighbouring_calls_share_no_seed():
    seeds = torch.stack([request_seeds(ids(seed, 40), 40, CPU) for seed in range(20)])
    assert len(seeds.unique()) == seeds.numel()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens and n must be ≥ 1, got 0 and 1"),
        ({"n": 0}, "max_new_tokens and n must be ≥ 1, got 4 and 0"),
        ({"temperature": -0.1}, r"temperature must be ≥ 0, got -0\.1"),
        ({"top_k": 0}, "top_k must be ≥ 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1\.5"),
        ({"min_p": 0.0}, r"min_p must be in \(0, 1\], got 0\.0"),
    ],
)
def test_parameters_that_cannot_be_sampled_with(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_new_tokens": 4} | options)
