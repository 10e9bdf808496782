"""What docs/estimators.md says about bias holds exactly, on languages and policies other than the page's too."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from experiments import estimators
from experiments.enumeration import Compared, compare, grouped, language, logits, logprobs, probabilities, true_gradient
from experiments.estimators_page import TITLES, page

EXACT = 1e-9


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[(3, 2, 0), (4, 2, 5)], ids=["3 tokens", "4 tokens"])
def setting(request):
    vocabulary, length, seed = request.param
    return estimators.setting(vocabulary, length, seed)


@pytest.mark.parametrize(("vocabulary", "length", "count"), [(3, 1, 3), (3, 2, 7), (3, 3, 15), (5, 2, 21)])
def test_the_language_is_whole(vocabulary, length, count):
    lang = language(vocabulary, length)
    assert len(lang.tokens) == count
    assert len({(*t[m],) for t, m in zip(lang.tokens, lang.mask, strict=True)}) == count
    table = logits(lang, vocabulary, 3)
    np.testing.assert_allclose(probabilities(lang, table).sum(), 1.0, rtol=1e-12)
    assert (logprobs(lang, table)[~lang.mask] == 0).all()


@pytest.mark.long
def test_kl_as_loss(setting):
    rows = estimators.kl_as_loss(setting)
    against_reverse = {name: reverse.error for name, (reverse, _) in rows.items()}
    against_forward = {name: forward.error for name, (_, forward) in rows.items()}
    assert rows["k1"][0].scale == pytest.approx(0, abs=EXACT) and against_reverse["k1"] == pytest.approx(1)
    for name in ("k2", "k1+", "k3+"):
        assert against_reverse[name] < EXACT and against_forward[name] > 0.01
    assert against_forward["k3"] < EXACT and against_reverse["k3"] > 0.01
    assert against_reverse["abs"] > 0.1 and against_forward["abs"] > 0.1


def test_kl_as_reward(setting):
    rows = estimators.kl_as_reward(setting)
    assert rows["k1 as reward"].error < EXACT
    assert all(rows[name].error > 1e-3 for name in rows if name != "k1 as reward")


def test_kl_on_other_rollouts(setting):
    rows = estimators.kl_off_policy(setting)
    assert rows["importance-corrected k3"].error < EXACT
    assert rows["k2, weighted by sg(π/μ)"].error < EXACT
    assert all(rows[name].error > 1e-3 for name in ("k2", "k3", "importance-corrected k3, log_clip 0.5"))


def test_values_are_expected_rewards(setting):
    values = estimators.critic(setting, wrong=0.0)
    expected = probabilities(setting.lang, setting.policy) @ setting.rewards
    np.testing.assert_allclose(values[:, 0], expected, rtol=1e-12)  # every sequence starts at the empty prefix


def test_advantages_from_a_critic(setting):
    right, wrong = estimators.critic_on_policy(setting, 0.0), estimators.critic_on_policy(setting)
    assert all(row.error < EXACT for row in right.values())
    assert wrong["Monte Carlo (n = T, or λ = 1)"].error < EXACT
    assert wrong["n-step, n = 1"] == pytest.approx(wrong["GAE, λ = 0"])
    errors = [wrong[f"GAE, λ = {lam:g}"].error for lam in (0.0, 0.5, 0.95)]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 1e-3


def test_advantages_from_a_critic_on_other_rollouts(setting):
    rows = estimators.critic_off_policy(setting)
    exact = rows.pop("V-trace, untruncated, × the prefix's π/μ")
    assert exact.error < EXACT
    assert all(row.error > 1e-3 for row in rows.values())


@pytest.mark.long
def test_group_methods():
    # Groups of four: of three, 0/1 rewards that differ all have the same std.
    rows = estimators.group_methods([estimators.setting(3, 2, 0), estimators.setting(3, 2, 10, right=0.3)], group=4)
    for name in ("REINFORCE, no baseline", "RLOO"):
        assert rows[name].error < EXACT
    assert rows["r − mean"].scale == pytest.approx(3 / 4) and rows["r − mean"].cosine == pytest.approx(1)
    horizon = rows["Dr. GRPO (÷ horizon)"]
    assert horizon.cosine == pytest.approx(1) and horizon.scale == pytest.approx(3 / 4 / estimators.LENGTH)
    for name in ("(r − mean)/std", "r − mean, per-completion token mean", "GRPO (std, per-completion token mean)"):
        assert rows[name].cosine < 1 - 1e-6
    assert rows["RLOO"].deviation < rows["REINFORCE, no baseline"].deviation


def test_one_prompt_of_right_and_wrong_keeps_its_direction_under_the_std(setting):
    """With rewards of 0 and 1 the std weights prompts against each other, and turns no prompt's own gradient."""
    truth = true_gradient(setting.lang, setting.policy, setting.rewards)
    whitened = rl_fn.recipes.reinforce().replace(advantage=rl_fn.components.GRPOAdvantage())
    sampled = grouped(setting.lang, setting.policy, whitened, setting.rewards, 3)
    assert compare(sampled, truth).cosine == pytest.approx(1, abs=1e-9)
    graded = jnp.asarray(np.random.default_rng(0).random(len(setting.rewards)) ** 3)
    truth = true_gradient(setting.lang, setting.policy, graded)
    assert compare(grouped(setting.lang, setting.policy, whitened, graded, 3), truth).cosine < 1 - 1e-6


@pytest.mark.long
def test_off_policy():
    rows = estimators.off_policy(estimators.setting(3, 2, 1, distance=1.0), group=2)
    assert rows["sequence, untruncated"].error < EXACT
    assert all(row.error > 1e-3 for name, row in rows.items() if name != "sequence, untruncated")
    assert rows["sequence, min(·, 2)"].deviation < rows["sequence, untruncated"].deviation


def test_the_page_is_what_the_script_writes():
    result = json.loads((estimators.RESULTS / "result.json").read_text())
    text = (estimators.ROOT / "docs" / "estimators.md").read_text()
    s = estimators.setting()
    for name, row in estimators.kl_as_reward(s).items():
        assert row._asdict() == pytest.approx(result["kl_as_reward"][name], rel=1e-6, abs=1e-9)
        assert f"| {name} | {row.cosine:.4f}".replace("-0.0000", "0.0000") in text.replace("-0.0000", "0.0000")


def test_the_page_shows_all_of_the_result_file():
    result = json.loads((estimators.RESULTS / "result.json").read_text())
    loss = {n: (Compared(**row["reverse"]), Compared(**row["forward"])) for n, row in result["kl_as_loss"].items()}
    tables = {title: {n: Compared(**row) for n, row in result[key].items()} for key, title in TITLES.items()}
    text = page(loss, tables, estimators.VOCABULARY, estimators.LENGTH)
    assert (estimators.ROOT / "docs" / "estimators.md").read_text(encoding="utf-8") == text
