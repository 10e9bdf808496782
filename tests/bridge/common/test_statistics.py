"""What is printed as 95 % is: shown by simulation, for seeds and for rows."""

import numpy as np
import pytest

from rl_bridge.common.statistics import confidence_interval, over_seeds, over_units, student


def covered(low, high):
    return float(np.mean((low <= 0) & (high >= 0)))


@pytest.mark.parametrize("seeds", [3, 4, 8, 20])
def test_the_interval_over_seeds_has_the_truth_as_often_as_it_says(seeds):
    """TOOL-6: a percentile bootstrap had it 75 % of the time over three seeds."""
    draws = np.random.default_rng(seeds).normal(size=(seeds, 10_000))
    _, low, high = student(draws)
    assert covered(low, high) == pytest.approx(0.95, abs=0.01)
    one = over_seeds(draws[:, 0].tolist(), [0.0] * seeds)
    assert (one["low"], one["high"], one["count"]) == pytest.approx((low[0], high[0], seeds))


def test_fewer_than_three_seeds_have_no_interval():
    """TOOL-6: over two seeds it was [the smaller, the larger], which has the truth half of the time."""
    for values in ([1.0], [1.0, 2.0]):
        found = over_seeds(values)
        assert (found["low"], found["high"], found["count"]) == (None, None, len(values))
        assert found["mean"] == np.mean(values)


def test_the_best_of_a_study_needs_fresh_seeds():
    """TOOL-6: of 16 equal trials the best one's interval leaves the truth out; that of fresh seeds does not."""
    draw, studies = np.random.default_rng(0), 4000
    trials = draw.normal(size=(3, studies, 16))
    best = np.take_along_axis(trials, trials.mean(0).argmax(1)[None, :, None], 2)[..., 0]
    chosen = student(best)[1:]
    fresh = student(draw.normal(size=(3, studies)))[1:]
    assert covered(*chosen) < 0.9 and covered(*fresh) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("rows", [5, 40])
def test_the_interval_over_rows_has_the_truth_as_often_as_it_says(rows):
    """TOOL-6: of few rows too, where a bootstrap is too narrow."""
    draws = np.random.default_rng(rows).normal(size=(400, rows))
    found = [confidence_interval(own, [0.0] * rows, resamples=500) for own in draws]
    assert covered(*(np.array([one[end] for one in found]) for end in ("low", "high"))) > 0.95 - 0.035


@pytest.mark.parametrize("prompts", [3, 8, 32])
def test_the_interval_over_prompts_has_the_truth_nearly_as_often_as_it_says(prompts):
    """TOOL-16: the mean of a quantised rollout's tokens had none, and tokens of a prompt are not independent."""
    draw, studies = np.random.default_rng(prompts), 1000

    def drawn(shape):
        counts = draw.integers(10, 300, size=shape)
        return draw.gamma(counts / 4, 0.04 * np.exp(0.4 * draw.normal(size=shape))), counts

    sums, counts = drawn((studies, prompts))
    truth = 0.01 * np.exp(0.4**2 / 2)
    found = [over_units(own, of_own) for own, of_own in zip(sums, counts, strict=True)]
    low, high = (np.array([one[end] for one in found]) - truth for end in ("low", "high"))
    assert 0.91 < covered(low, high) < 0.97
    # As if each token were a draw of its own.
    naive = [1.96 * one["mean"] / np.sqrt(of_own.sum()) for one, of_own in zip(found, counts, strict=True)]
    means = np.array([one["mean"] for one in found]) - truth
    assert covered(means - naive, means + naive) < 0.7


def test_what_has_no_interval_over_prompts():
    assert over_units([1.0, 2.0], [1, 1]) == {"mean": 1.5, "low": None, "high": None, "level": 0.95, "count": 2}
    assert over_units([1.0, 1.0, 1.0], [1, 0, 0])["low"] is None
    assert over_units([0.0, 0.0, 0.0], [2, 2, 2])["high"] == 0
    assert over_units([0.0, 0.0, 3.0], [1, 1, 1])["low"] == 0
    for sums, counts in (([1.0], [1, 2]), ([], []), ([-1.0], [1])):
        with pytest.raises(ValueError, match="need sums of 0 or more"):
            over_units(sums, counts)


def test_the_interval_of_the_same_rows_is_the_same_in_every_version():
    """The resamples have a seed of their own: what was published is found again."""
    draws = np.random.default_rng(3).normal(size=40)
    found = confidence_interval(draws, np.zeros(40))
    assert (found["low"], found["high"]) == pytest.approx((-0.401767, 0.320284), abs=1e-6)
