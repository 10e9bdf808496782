"""When held-out rows are evaluated, by which draws, and which completions a rate and a difference are of."""

import math
from dataclasses import replace

import pytest
import torch

from rl_bridge.algorithms.completion_log import STEPS
from rl_bridge.algorithms.completion_log import due as is_logged
from rl_bridge.algorithms.evaluation import Evaluator, evaluate, evaluate_both, gain, pass_rates, pass_rates_of
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.rewards import RewardError

NAN = math.nan
SAMPLING = SamplingParams(max_new_tokens=4, n=3, temperature=0.7)
CONFIG = PolicyConfig(steps=7, prompts_per_step=1, sampling=SAMPLING, evaluate_every=3)


class Places:
    """A reward: the place of the row, and another ten times that, or the named numbers."""

    weights = (1.0, 1.0)

    def __init__(self, names=("place",), values=float):
        self.names, self.values, self.weights = names, values, (1.0,) * len(names)

    def score(self, trajectories):
        return [
            replace(t, rewards={name: self.values(t.group) * 10**i for i, name in enumerate(self.names)})
            for t in trajectories
        ]


class Asked:
    """Completes rows, and keeps how it was asked; rows of ``aborted`` are given up."""

    def __init__(self, aborted=()):
        self.sampling, self.aborted = [], aborted

    def __call__(self, rows, sampling):
        self.sampling.append(sampling)
        return [
            single_turn(
                [2],
                [3],
                group=place,
                finish_reason="abort" if place in self.aborted else "stop",
                messages=({"role": "assistant", "content": str(number)},),
            )
            for place in range(len(rows))
            for number in range(sampling.n)
        ]


def rows(count):
    return [{"prompt": str(place)} for place in range(count)]


def test_steps_are_followed_by_an_evaluation_every_so_often_and_the_last_one_always():
    evaluator = Evaluator(Asked(), Places(), rows(2), CONFIG, None)
    assert [step for step in range(7) if evaluator.due(step)] == [2, 5, 6]


def test_an_evaluation_draws_one_greedy_completion_of_each_row_by_the_run_s_seed():
    asked = Asked()
    results = evaluate(asked, rows(20), Places(), SAMPLING, seed=5)
    assert asked.sampling == [replace(SAMPLING, temperature=0.0, n=1, seed=5)]
    assert results["scores"] == list(range(20)) and results["reward"] == 9.5 and results["rewards"] == {"place": 9.5}
    assert [sample["prompt"] for sample in results["samples"]] == [str(place) for place in range(16)]
    evaluate(asked, rows(1), Places(), SAMPLING)
    assert asked.sampling[1].seed == 0


def test_both_evaluations_are_under_their_own_names():
    asked = Asked()
    both = evaluate_both(asked, rows(2), Places(), CONFIG, 5)
    assert list(both) == ["greedy", "sampled"]
    assert sorted((s.temperature, s.n, s.seed) for s in asked.sampling) == [(0.0, 1, 5), (0.7, 1, 5)]


def test_what_was_given_up_is_in_no_mean_and_no_difference(capsys):
    asked = Asked(aborted=[1])
    results = evaluate(asked, rows(3), Places(("place", "ten")), SAMPLING)
    assert results["scores"] == [0.0, None, 22.0] and results["aborted"] == pytest.approx(1 / 3)
    assert results["reward"] == 11.0 and results["rewards"] == {"place": 1.0, "ten": 10.0}
    assert [sample.get("failed") for sample in results["samples"]] == [None, "abort", None]
    evaluate_both(asked, rows(3), Places(), CONFIG, 5)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("33.3% of the held-out completions") == 2
    later = {"scores": [1.0, 5.0, None, 4.0]}
    assert gain(later, {"scores": [0.5, None, 7.0, 1.0]})["mean"] == pytest.approx((0.5 + 3.0) / 2)


@pytest.mark.parametrize(("pass_samples", "drawn"), [(None, 4), (5, 5)])
def test_as_many_completions_are_drawn_as_the_largest_k_needs(pass_samples, drawn):
    asked, config = Asked(), replace(CONFIG, pass_at=(1, 4, 2), pass_samples=pass_samples, correct_reward=1.0)
    rates = pass_rates(asked, rows(3), Places(), config, seed=5)
    assert asked.sampling == [replace(SAMPLING, n=drawn, seed=5)]
    assert {name: rate["mean"] for name, rate in rates.items()} == pytest.approx(dict.fromkeys(rates, 2 / 3))
    assert list(rates) == ["pass@1", "pass@4", "pass@2"]


def test_a_rate_is_of_rows_with_enough_completions_and_a_reward_that_is_just_enough_passes():
    earned = torch.tensor([[1.0, 0.999, NAN], [0.0, 0.0, 0.0], [1.0, NAN, NAN]])
    rates = pass_rates_of(earned, (1, 2, 3), 1.0)
    assert rates["pass@1"]["mean"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert rates["pass@2"]["mean"] == pytest.approx((1 + 0) / 2)
    assert rates["pass@3"]["mean"] == 0
    with pytest.raises(RewardError, match="pass@3 needs 3 completions of a row"):
        pass_rates_of(earned[:, :2], (3,), 1.0)


def test_the_held_out_metrics_of_a_step_are_the_reward_the_interval_and_what_failed():
    config = replace(CONFIG, pass_at=(1,), correct_reward=1.0)
    asked = Asked(aborted=[3])
    evaluator = Evaluator(asked, Places(), rows(4), config, None, seed=5)
    metrics = evaluator.metrics(2)
    assert [(s.n, s.seed, s.temperature) for s in asked.sampling] == [(1, 5, 0.0), (1, 5, 0.7)]
    assert metrics["held_out"] == 1.0 and metrics["held_out_low"] < 1.0 < metrics["held_out_high"]
    assert metrics["held_out_aborted"] == 0.25 and metrics["pass@1"] == pytest.approx(2 / 3)
    assert "held_out/place" not in metrics and evaluator.parts() == {}


@pytest.mark.parametrize("every", [1, 3])
def test_kept_steps_are_at_a_distance_that_doubles_behind_each_stretch(every):
    kept = [step for step in range(6 * every * STEPS) if is_logged(step, every)]
    assert kept[:STEPS] == list(range(0, every * STEPS, every))
    gaps = [later - one for one, later in zip(kept[STEPS:], kept[STEPS + 1 :], strict=False)]
    assert gaps == sorted(gaps) and set(gaps) == {2 * every, 4 * every, 8 * every}
    assert not is_logged(0, 0)
