"""Sentences of docs/numerics.md and docs/conventions.md are true, and name the functions that they are about."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.registry import CASES, CONSTRUCTORS, HOST

DOCS = Path(__file__).parents[3] / "docs"


def paragraph(file: str, head: str) -> str:
    text = (DOCS / file).read_text(encoding="utf-8")
    return text.split(f"**{head}.**")[1].split("\n**")[0]


def functions_in(text: str) -> list[str]:
    return [name for name in re.findall(r"`(\w+)`", text) if inspect.isfunction(getattr(rl_fn, name, None))]


RATIO, LOGPROB = (functions_in(text) for text in paragraph("numerics.md", "Excluded tokens").split("Where log π")[:2])
LOGPROB = [name for name in LOGPROB if name != "apo_zero"]
CONSTANTS = {"dppo": {"threshold": 0.1}, "cispo": {"clip_high": 0.2}, "dro": {"beta": 0.1}}
OLD, MASK = np.float32([[-1.2, -1.0, -1.8]]), np.ones((1, 3), bool)
CUT_OFF = np.float32([[-1.0, -np.inf, -2.0]])


def loss(name, logprobs, advantage):
    advantages, options = np.full((1, 3), advantage, np.float32), CONSTANTS.get(name, {})
    if name == "reinforce":
        return rl_fn.reinforce(logprobs, advantages, MASK)
    if name == "dpo":
        return rl_fn.dpo(logprobs, logprobs, OLD, OLD, MASK)
    if name.startswith("kl_k"):
        return getattr(rl_fn, name)(logprobs, OLD, MASK)
    between = (OLD, OLD) if name == "decoupled_ppo" else (OLD,)
    return getattr(rl_fn, name)(logprobs, *between, advantages, MASK, **options)


def test_the_document_names_losses_of_both_kinds():
    assert {"ppo_clip", "sapo"} <= set(RATIO) and {"reinforce", "cispo", "dpo"} <= set(LOGPROB)


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_an_excluded_token_has_ratio_0_and_gradient_0_in_the_losses_of_a_ratio(name, advantage):
    found = loss(name, CUT_OFF, advantage)
    np.testing.assert_allclose(
        found, loss(name, np.where(CUT_OFF < -1e3, np.float32(-60), CUT_OFF), advantage), atol=1e-6
    )
    slope = jax.grad(lambda x: jnp.sum(loss(name, x, advantage)))(CUT_OFF)
    assert np.isfinite(slope).all() and slope[0, 1] == 0


@pytest.mark.parametrize("name", LOGPROB)
def test_an_excluded_token_is_not_finite_where_its_log_probability_is_the_loss(name):
    found = loss(name, CUT_OFF, 1.0)
    assert np.isfinite(found).tolist() == [[True, False, True]]


def test_an_infinite_loss_times_an_advantage_of_0_is_not_a_number():
    assert np.isnan(loss("reinforce", CUT_OFF, 0.0)).tolist() == [[False, True, False]]
    assert np.isfinite(rl_fn.apo_zero(*(np.float32([x]) for x in (-np.inf, -1.0, -1.0, -1.0)))).all()


REWARDS = np.float32([0.3, -1.2, 0.7, 1.1])


@pytest.mark.parametrize("scale", [1e-16, 1e-3, 1e3, 1e16])
def test_without_eps_the_scale_of_rewards_changes_rounding_only(scale):
    expected = rl_fn.grpo_advantages(REWARDS, eps=0.0)
    np.testing.assert_allclose(rl_fn.grpo_advantages(REWARDS * np.float32(scale), eps=0.0), expected, rtol=1e-5)


def test_deviations_whose_squares_are_no_numbers_count_as_equal():
    assert not np.asarray(rl_fn.grpo_advantages(REWARDS * np.float32(1e-25), eps=0.0)).any()


def test_the_default_eps_costs_small_rewards_a_thousandth():
    of_spread_1 = REWARDS / np.std(REWARDS, ddof=1)
    small, plain = (rl_fn.grpo_advantages(np.float32(s) * of_spread_1) for s in (1e-3, 1.0))
    np.testing.assert_allclose(small / plain, 0.999, rtol=1e-5)


WITH_EPS = {case.name: key for key, case in CASES.items() if "eps" in inspect.signature(case.function).parameters}


@pytest.mark.parametrize("name", sorted(WITH_EPS))
def test_eps_0_is_legal(name):
    args, kwargs = CASES[WITH_EPS[name]].make(0)
    leaves = jax.tree.leaves(CASES[name].function(*args, **{**kwargs, "eps": 0.0}))
    assert all(np.isfinite(x).all() for x in leaves)


ARGUMENTS = paragraph("conventions.md", "Arguments")
BEFORE, AFTER = ARGUMENTS.split("`sample` alone")
POSITIONAL, HOSTED = functions_in(BEFORE), functions_in(AFTER)


def _is_hyper_parameter(parameter: inspect.Parameter) -> bool:
    words = str(parameter.annotation)
    plain = parameter.annotation in (int, float, str, bool)
    return parameter.kind is not parameter.KEYWORD_ONLY and (plain or "[float, int" in words or "[int, " in words)


def test_hyper_parameters_are_keyword_only_but_for_those_named():
    found = {
        name
        for name in rl_fn.__all__
        if inspect.isfunction(function := getattr(rl_fn, name)) and name not in CONSTRUCTORS
        if any(_is_hyper_parameter(p) for p in inspect.signature(function).parameters.values())
    }
    assert found == set(POSITIONAL)


def test_one_function_takes_a_key_and_takes_it_first():
    parameters = {name: list(inspect.signature(CASES[name].function).parameters) for name in CASES if "[" not in name}
    assert [name for name, names in parameters.items() if "key" in names] == ["sample"]
    assert parameters["sample"][0] == "key"


def test_the_functions_of_the_host_are_named_and_return_numpy():
    assert set(HOSTED) == set(HOST)
    lengths, points = [3, 1, 2, 2], np.float32([[1.0, 2.0], [2.0, 1.0]])
    shards = rl_fn.zigzag_split(np.arange(8), 2)
    results = [
        rl_fn.balance(lengths, 2),
        rl_fn.pack(lengths, 4),
        rl_fn.position_ids(lengths),
        rl_fn.segment_ids(lengths),
        shards,
        rl_fn.zigzag_gather(shards),
        rl_fn.hypervolume(points, [0.0, 0.0], maximize=True),
        rl_fn.hypervolume_contribution(points, [0.0, 0.0], maximize=True),
    ]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(results))


@pytest.mark.parametrize("make", [float, np.float32, np.float64, np.array, jnp.array])
def test_a_range_is_checked_where_the_hyper_parameter_is_one_known_number(make):
    same, beta = jnp.zeros(1), make(-1.0)
    with pytest.raises(ValueError, match="-1"):
        jax.jit(lambda x: rl_fn.dpo(x, x, x, x, beta=beta))(same)
    jax.jit(lambda x, beta: rl_fn.dpo(x, x, x, x, beta=beta))(same, -1.0)
