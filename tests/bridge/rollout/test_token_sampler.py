import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.sampling import draw, request_seeds
from tests.bridge.rollout.distribution import truncated

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -float("inf"), 1.9, -3.0])
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


def drawn(logits, seeds, position=0, **options):
    return draw(logits, seeds, torch.full_like(seeds, position), params(**options))


@pytest.mark.long
@pytest.mark.parametrize("options", TRUNCATIONS)
def test_frequencies_are_those_of_the_truncated_distribution(options):
    count = 100_000
    p = truncated(LOGITS, **options)
    result = drawn(LOGITS.expand(count, -1), request_seeds([(11, 0)], count)[0], **options)
    tokens = result.tokens.numpy()
    np.testing.assert_allclose(result.logprobs.numpy(), np.log(p[tokens]), atol=1e-6)
    observed = np.bincount(tokens, minlength=len(p))
    assert not observed[p == 0].any()
    assert scipy.stats.chisquare(observed[p > 0], count * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("options", TRUNCATIONS)
def test_allowed_tokens_are_those_of_positive_probability_where_truncation_can_cut(options):
    result = drawn(LOGITS[None], torch.tensor([5]), **options)
    if not {"top_k", "top_p", "min_p"} & set(options):
        assert result.allowed_tokens is None
    else:
        assert result.allowed_tokens.tolist() == [np.flatnonzero(truncated(LOGITS, **options)).tolist()]


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_k": 900}, {"top_p": 1.0}, {"temperature": 0.0, "top_k": 2}])
def test_what_cuts_nothing_off_records_nothing(options):
    seeds = torch.arange(50)
    result = drawn(LOGITS.expand(50, -1), seeds, **options)
    assert result.allowed_tokens is None
    plain = drawn(LOGITS.expand(50, -1), seeds, temperature=options.get("temperature", 1.0))
    assert torch.equal(result.tokens, plain.tokens) and torch.equal(result.logprobs, plain.logprobs)


def test_greedy_is_the_argmax_with_probability_one():
    rows = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(7)])
    result = drawn(rows, torch.arange(3), temperature=0.0)
    assert result.tokens.tolist() == [2, 4, 0] and result.logprobs.tolist() == [0.0, 0.0, 0.0]


def test_half_precision_logits_are_sampled_in_float32():
    assert drawn(LOGITS[None].bfloat16(), torch.tensor([5])).logprobs.dtype == torch.float32


def test_draws_are_independent_over_seeds_and_positions():
    seeds, half = request_seeds([(0, 0)], 2000)[0], torch.zeros(1, 2)
    tokens = torch.stack([drawn(half.expand(2000, 2), seeds, position).tokens for position in (0, 1, 1000)]).numpy()
    assert all(scipy.stats.binomtest(int(of.sum()), 2000).pvalue > 1e-3 for of in tokens)
    assert (abs(np.corrcoef(tokens) - np.eye(3)) < 0.08).all()
    assert (abs(np.corrcoef(tokens[:, :-1], tokens[:, 1:])[:3, 3:]) < 0.08).all()


@given(seed=st.integers(-(2**70), 2**70), prompts=st.integers(1, 6), samples=st.integers(1, 6))
def test_a_seed_belongs_to_its_prompt_and_sample_and_not_to_their_number(seed, prompts, samples):
    seeds = request_seeds(ids(seed, 6), 6)
    assert torch.equal(request_seeds(ids(seed, prompts), samples), seeds[:prompts, :samples])
    assert len(seeds.unique()) == 36


def test_a_seed_belongs_to_its_id_whatever_stands_beside_it():
    several = [(5,), (5, 0), (5, 0, 0), (5, 1), (-5, 1)]
    seeds = request_seeds(several, 3)
    assert len(seeds.unique()) == 15
    for id, row in zip(several, seeds, strict=True):
        assert torch.equal(request_seeds([(9, 9), id], 3)[1], row)
    with pytest.raises(ValueError, match=r"a request needs an id of at least one number, got \[\(1,\), \(\)\]"):
        request_seeds([(1,), ()], 1)


def test_the_seeds_of_runs_until_now_stay_as_they_were():
    assert request_seeds([(7, 0), (7, 3)], 2).tolist() == OF_SEED_7


def test_neighbouring_calls_share_no_seed():
    seeds = torch.stack([request_seeds(ids(seed, 40), 40) for seed in range(20)])
    assert len(seeds.unique()) == seeds.numel()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens and n must be ≥ 1, got 0 and 1"),
        ({"n": 0}, "max_new_tokens and n must be ≥ 1, got 4 and 0"),
        ({"temperature": -0.1}, r"temperature must be 0, .* or from 1e-30 to 1e\+30, .*, got -0\.1"),
        ({"top_k": 0}, "top_k must be ≥ 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1\.5"),
        ({"min_p": 0.0}, r"min_p must be in \(0, 1\], got 0\.0"),
        ({"temperature": float("nan")}, "temperature must be 0, .*, got nan"),
        ({"temperature": float("inf")}, "temperature must be 0, .*, got inf"),
        ({"temperature": 1e39}, r"temperature must be 0, .*, got 1e\+39"),
        ({"temperature": 10**400}, "temperature must be 0, .*, got 1000"),
        ({"temperature": 1e-40}, "temperature must be 0, .*, got 1e-40"),
        ({"temperature": np.float32(1e30)}, r"temperature must be 0, .*, got 1\.0000000150474662e\+30"),
        ({"temperature": 1e-50}, "temperature must be 0, .*, got 1e-50"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\], got nan"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"n": 2.0}, r"n must be an integer, got 2\.0"),
        ({"seed": "7"}, "seed must be an integer, got '7'"),
        ({"top_k": 5.0}, r"top_k must be an integer or None, got 5\.0"),
        ({"min_p": False}, "min_p must be a number or None, got False"),
    ],
)
def test_parameters_that_cannot_be_sampled_with(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**{"max_new_tokens": 4} | options)


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint32], ids=lambda kind: kind.__name__)
def test_numbers_of_numpy_are_python_s(kind):
    """A top_k of NumPy was refused as smaller than 1 by the sampler, and a seed overflowed in it."""
    fields = {name: kind(5) for name in ("max_new_tokens", "n", "seed", "top_k")}
    fields |= {name: np.float32(0.5) for name in ("temperature", "top_p", "min_p")}
    sampling = SamplingParams(**fields)
    assert sampling == SamplingParams(**{name: value.item() for name, value in fields.items()})
    assert {type(getattr(sampling, name)) for name in fields} == {int, float}
    assert request_seeds([(sampling.seed, 0)], sampling.n).tolist() == request_seeds([(5, 0)], 5).tolist()
