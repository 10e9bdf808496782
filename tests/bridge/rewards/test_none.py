"""A reward's None: refused, or a completion that the reward does not apply to, which then changes nothing."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rl_bridge
import rl_fn
from rl_bridge.algorithms.completions import without_signal
from rl_bridge.algorithms.evaluation import evaluate, gain, interval
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.rewards import RewardError, RewardOptions, load, with_rows
from tests.support.reward_batches import rows, trajectories, values

FORMS = {
    "a completion": lambda completion, row: None if completion == "b" else 1.0,
    "a batch": lambda trajectories: [None if t.completion == "b" else 1.0 for t in trajectories],
    "TRL's": lambda completions, **columns: [None if text == "b" else 1.0 for text in completions],
    "verl's": lambda data_source, solution_str, ground_truth, extra_info: {
        "score": None if solution_str == "b" else 1.0
    },
    "by name": lambda completion, row: {"one": None if completion == "b" else 1.0, "two": 2.0},
}
SAMPLING = rl_bridge.SamplingParams(n=4, max_new_tokens=4, seed=3)
GROUPED = ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "opo", "reinforce_pp"]


async def later(completion, row):
    return FORMS["a completion"](completion, row)


@pytest.mark.parametrize("reward", [*FORMS.values(), later], ids=[*FORMS, "later"])
def test_none_is_refused_with_the_way_on_or_no_reward(reward):
    with pytest.raises(
        RewardError, match=r"row 2 returned None, expected a finite number; completion 'b'; with --rew.* le"
    ):
        load(reward).score(trajectories("a", "b"))
    first, second = load(reward, none="leave-out").score(trajectories("a", "b"))
    name = "one" if reward is FORMS["by name"] else "reward"
    assert first.rewards[name] == 1.0 and math.isnan(second.rewards[name])


def test_a_process_of_its_own_says_none_too(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion, row): return None if completion == 'b' else 1.0\n")
    options = RewardOptions(reward=(f"{tmp_path / 'mine.py'}:score",), reward_timeout=60.0, reward_none="leave-out")
    rewards = options.rewards()
    found = values(rewards, "a", "b")
    rewards.close()
    assert found[0] == 1.0 and math.isnan(found[1])


def test_a_verl_s_result_without_a_score_and_a_missing_return_are_no_none():
    verl = load(lambda data_source, solution_str, ground_truth, extra_info: {"acc": 1.0}, none="leave-out")
    with pytest.raises(RewardError, match=r"returned {'acc': 1.0}, expected a number named score"):
        values(verl, "a")
    with pytest.raises(RewardError, match=r"no reward of reward returned a number for .*row 1 or .*row 2.*missing"):
        load(lambda completion, row: None, none="leave-out").try_on(rows(2))
    with pytest.raises(ValueError, match="without a reward that may return None"):
        RewardOptions(reward_none="leave-out")


@pytest.mark.parametrize("before", [0, 1, 2, 7, 100, 1000])
def test_the_rewards_of_a_later_task_are_named_before_a_run_begins(before):
    """Weights of all rewards were refused where the first two rows had another task."""

    def style(completion, row):
        return 1.0

    def right(completion, row):
        return {"right": 1.0, "form": 0.5} if row["task"] == "sums" else None

    tasks = [*["prose"] * before, *["sums"] * (3 + before // 2)]
    of_tasks = [{**row, "task": task} for row, task in zip(rows(len(tasks)), tasks, strict=True)]
    rewards = load([style, right], weights=[1.0, 1.0, 0.5], none="leave-out")
    rewards.try_on(of_tasks)
    assert rewards.names == ("style", "right", "form") and rewards.weights == (1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="there are 2 weights"):
        load([style, right], weights=[1.0, 1.0], none="leave-out").try_on(of_tasks)
    alone = load(right, none="leave-out")
    alone.try_on(of_tasks)
    assert alone.names == ("right", "form"), "it was said to lack a return"
    if before:
        with pytest.raises(
            ValueError, match=r"there are 3 weights .*; right returned None for all rows that were tried"
        ):
            load([style, right], weights=[1.0, 1.0, 0.5], none="leave-out").try_on(of_tasks[:before])


def test_rewards_whose_names_are_known_are_tried_on_two_rows():
    """A judge was asked about 64, beside a reward that never applied."""
    asked = []

    def judge(completion, row):
        asked.append(row["prompt"])
        return 1.0

    load([judge, lambda completion, row: None], none="leave-out").try_on(rows(200))
    assert len(set(asked)) == 2


@pytest.mark.parametrize("tried", [False, True])
def test_two_rewards_of_one_name_are_refused_whenever_the_second_shows_its_own(tried):
    """The first one's values were gone, and the second one's counted twice."""

    def accuracy(completion, row):
        return 0.25

    def right(completion, row):
        return {"accuracy": 1.0, "form": 0.5} if completion == "b" else None

    rewards = load([accuracy, right], none="leave-out")
    if tried:
        rewards.try_on(rows(70))
    assert values(rewards, "a", name="accuracy") == [0.25]
    with pytest.raises(ValueError, match="two rewards have the name 'accuracy'"):
        values(rewards, "b", name="accuracy")


def groups_of(*rewards):
    """Completions of unequal lengths with these rewards, scored."""
    flat = [reward for group in rewards for reward in group]
    drawn = []
    for number in range(len(flat)):
        length, messages = (
            1 + number % 3,
            ({"role": "user", "content": "x"}, {"role": "assistant", "content": str(number)}),
        )
        row = single_turn(
            [5], [6] * length, logprobs=[-0.5] * length, group=number // len(rewards[0]), messages=messages
        )
        drawn.append(replace(row, row={"prompt": "x"}))
    groups = rl_bridge.Groups(trajectories=drawn, sampling=replace(SAMPLING, n=len(rewards[0])), pad_token=0)
    return groups.score(lambda completion, row: flat[int(completion)], none="leave-out")


@pytest.mark.parametrize("recipe", GROUPED)
def test_the_others_are_compared_as_if_a_completion_without_a_reward_were_not_there(recipe):
    objective = getattr(rl_fn.recipes, recipe)().replace(kl=None, reward_kl=None)
    # Number 3 has no reward, or is not there.
    with_none = groups_of([1.0, 0.0, 0.5, None]).batch().with_advantages(objective)
    without = groups_of([1.0, 0.0, 0.5]).batch().with_advantages(objective)
    assert not with_none.computed[3] and not with_none.counted[3].any() and not with_none.tokens.advantages[3].any()
    assert torch.equal(with_none.computed[:3], without.computed) and torch.equal(with_none.counted[:3], without.counted)
    torch.testing.assert_close(with_none.tokens.advantages[:3], without.tokens.advantages)
    assert without.tokens.advantages.any()


@pytest.mark.parametrize("recipe", GROUPED)
def test_completions_that_a_choice_leaves_out_are_as_if_they_were_not_there(recipe):
    """Groups of unlike sizes: each is compared as a group of its own size."""
    objective = getattr(rl_fn.recipes, recipe)().replace(kl=None, reward_kl=None)
    rewards, masks = [[1.0, 0.0, 0.5], [0.0, 2.0, 1.0], [1.0, 1.0, 0.0]], [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    chosen = groups_of(*rewards).select(torch.tensor(masks).bool())
    nones = groups_of(
        *[[r if m else None for r, m in zip(*of, strict=True)] for of in zip(rewards, masks, strict=True)]
    )
    nones = nones.select([0, 1])
    assert chosen.valid.tolist() == nones.valid.tolist() == [[True, True, False], [True] * 3]
    one, other = (groups.batch().with_advantages(objective) for groups in (chosen, nones))
    assert torch.equal(one.tokens.advantages, other.tokens.advantages) and one.tokens.advantages.any()
    assert torch.equal(one.computed, other.computed) and torch.equal(one.counted, other.counted)
    assert not one.computed[2] and not one.counted[2].any()


def test_what_a_choice_leaves_out_stays_out_and_is_measured():
    groups = groups_of([1.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    chosen = groups.select(~torch.tensor([[True, False, False], [False, False, True]]))
    assert chosen.metrics()["left_out"] == pytest.approx(1 / 3) and "left_out" not in groups.metrics()
    assert chosen.metrics()["reward"] == pytest.approx(2 / 4) and chosen.held_out()["held_out"] == pytest.approx(0.5)
    other = chosen.score(lambda completion, row: 3.0)
    assert other.valid.tolist() == chosen.valid.tolist() and other.metrics()["reward"] == 3.0
    several = groups.score([lambda completion, row: 1.0, lambda completion, row: float(completion)])
    parts = several.select(~torch.tensor([[True, True, True], [True, False, True]])).metrics()
    named = {name: number for name, number in parts.items() if name.startswith("reward")}
    assert named.pop("reward") == pytest.approx(sum(named.values())) and len(named) == 2
    again = chosen.select(torch.tensor([[True, True, False], [True, True, True]]))
    assert again.valid.tolist() == [[False, True, False], [True, True, False]]
    assert again.select([1]).valid.tolist() == [[True, True, False]]
    other = replace(groups, sampling=replace(groups.sampling, seed=9))
    for parts, expected in (([other, again], [3, 3, 1, 2]), ([again, other], [1, 2, 3, 3]), ([other, groups], [3] * 4)):
        assert rl_bridge.Groups.joined(parts).valid.sum(1).tolist() == expected
    nothing = groups.select(torch.zeros(2, 3, dtype=torch.bool))
    assert not nothing.trajectories and nothing.rewards.shape == (0, 3)
    left = replace(groups.scored, chosen=torch.zeros(2, 3, dtype=torch.bool))
    assert without_signal(left).endswith("completions: select left out all that have a reward")
    assert groups.truncated.tolist() == [[False] * 3] * 2
    cut = replace(groups, trajectories=[replace(t, finish_reason="length") for t in groups.trajectories[:3]] * 2)
    assert cut.truncated.all()


def test_metrics_and_evaluations_are_of_the_completions_that_have_a_reward():
    groups = groups_of([1.0, None, 0.0, 1.0], [None, None, None, None], [0.0, 0.0, None, None])
    metrics = groups.metrics()
    assert metrics["reward"] == pytest.approx(2 / 5) and metrics["unrewarded"] == pytest.approx(7 / 12)
    held_out = groups.held_out(pass_at=(1, 2))
    assert held_out["held_out"] == pytest.approx((2 / 3 + 0) / 2)
    assert held_out["pass@1"] == pytest.approx((2 / 3 + 0) / 2) and held_out["pass@2"] == pytest.approx(0.5)
    with pytest.raises(RewardError, match="pass@4 needs 4 completions of a row to which a reward applies, and no row"):
        groups.held_out(pass_at=(4,))
    assert not groups.select([1]).valid.any() and groups.select([0]).valid.tolist() == [[True, False, True, True]]
    assert rl_bridge.Groups.joined([groups.select([0]), groups.select([2])]).valid.sum() == 5
    nothing = groups_of([None, None])
    assert (nothing.metrics()["reward"], nothing.metrics()["unrewarded"]) == (0.0, 1.0)
    assert not nothing.batch().with_advantages(rl_fn.recipes.dapo()).computed.any()
    assert without_signal(nothing.scored) == "no update, 1 groups of 2 completions: no reward applies to any of these"


def test_several_rewards_make_the_number_of_those_that_apply():
    matrix = torch.tensor([[[1.0, math.nan, math.nan], [2.0, 4.0, math.nan]]])
    total = ScalarOptions().combine(matrix, (1.0, 0.5))
    assert total[0, :2].tolist() == [2.0, 2.0] and bool(total[0, 2].isnan())
    tchebycheff = ScalarOptions(method="tchebycheff", ideal=(5.0, 5.0))
    with pytest.raises(ValueError, match="tchebycheff looks at all rewards of a completion, and one returned None"):
        tchebycheff.combine(matrix, (1.0, 1.0))
    assert bool(tchebycheff.combine(matrix[:, :, 2:], (1.0, 1.0)).isnan().all())
    groups = groups_of([1.0, 0.0])
    rewards = load(FORMS["by name"], none="leave-out")
    assert rewards.total(rewards.score(trajectories("b"))[0].rewards) == 2.0
    of_one = [replace(trajectory, group=0) for trajectory in trajectories("a", "b", data=rows(1) * 2)]
    both = replace(groups, trajectories=of_one).score(FORMS["by name"], none="leave-out")
    metrics = both.metrics()
    assert (metrics["reward/one"], metrics["unrewarded/one"], metrics["unrewarded/two"]) == (1.0, 0.5, 0.0)
    assert metrics["unrewarded"] == 0.0 and metrics["reward"] == 2.5
    with pytest.raises(ValueError, match="gdpo compares each reward within a group, and one returned None"):
        both.batch().with_advantages(rl_fn.recipes.gdpo())


def complete(rows, sampling):
    """Completion number i says i."""
    return [
        single_turn(
            [2], [3, 4], group=place, request_id=(sampling.seed, place, number),
            messages=({"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": str(number)}),
        )
        for place, row in enumerate(rows)
        for number in range(sampling.n)
    ]  # fmt: skip


def named(name):
    def function(completion, row):
        return None

    function.__name__ = name
    return function


def test_an_evaluation_leaves_rows_out_and_pairs_those_with_both_scores():
    options = SamplingParams(max_new_tokens=4)

    def even(completion, row):
        return None if int(row["answer"]) % 2 else float(row["answer"])

    result = evaluate(complete, rows(5), load(even, none="leave-out"), options)
    assert result["scores"] == [0.0, None, 2.0, None, 4.0] and result["reward"] == result["rewards"]["reward"] == 2.0
    assert [sample["reward"] for sample in result["samples"]] == result["scores"]
    assert interval(result["scores"])["mean"] == 2.0
    after = {"scores": [1.0, 5.0, None, 7.0, 4.5]}
    assert gain(after, result)["mean"] == pytest.approx((1.0 + 0.5) / 2)
    with pytest.raises(RewardError, match="reward odd returned None for all 5 held-out completions"):
        evaluate(complete, rows(5), load([named("odd"), even], none="leave-out"), options)


def test_a_baseline_without_a_reward_is_refused():
    def reward(completion, row):
        return None if row["answer"] == "1" and completion == "0" else float(completion)

    def drawn(sampling):
        trajectories = with_rows(complete(rows(3), sampling), rows(3))
        return rl_bridge.Groups(trajectories=trajectories, sampling=sampling, pad_token=0)

    groups, greedy = drawn(replace(SAMPLING, n=2)), drawn(replace(SAMPLING, n=1, temperature=0.0))
    with pytest.raises(RewardError, match=r"no reward applies to the greedy completion of problems\.jsonl, row 2"):
        groups.score(reward, none="leave-out", greedy=greedy)


KINDS = {"both": {"right": 1.0, "short": 2.0}, "other order": {"short": 2.0, "right": 1.0}, "None": None}
LACKING = {"without short": {"right": 1.0}, "short is None": {"short": None, "right": 1.0}}


@pytest.mark.parametrize("order", list(itertools.permutations([*KINDS, *LACKING], 3)), ids="-".join)
def test_dictionaries_in_any_order_and_none_are_values_of_the_same_rewards(order):
    kinds = KINDS | LACKING
    rewards = load(lambda completion, row: kinds[completion], none="leave-out")
    shown = [
        dict.fromkeys(("right", "short"), math.nan) | {k: v for k, v in (kinds[kind] or {}).items() if v}
        for kind in order
    ]
    for _ in range(2):  # the names of the first call are those of all
        for trajectory, expected in zip(rewards.score(trajectories(*order)), shown, strict=True):
            assert trajectory.rewards.keys() == {"right", "short"} == set(rewards.names)
            assert trajectory.rewards == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [*KINDS, *LACKING])
def test_without_leave_out_only_the_order_may_change(first, second):
    kinds = KINDS | LACKING
    rewards = load(lambda completion, row: kinds[completion])
    if "None" in (first, second) or second in LACKING:
        with pytest.raises(
            RewardError, match=r"returned None, expected|returned the rewards \['right'\], before they were"
        ):
            rewards.score(trajectories(first, second))
    else:
        for trajectory in rewards.score(trajectories(first, second)):
            assert trajectory.rewards == KINDS["both"]


def test_names_come_with_the_first_values_that_are_no_none():
    reward = FORMS["by name"]
    rewards = load([reward, lambda completion, row: {"c": None} if completion == "x" else None], none="leave-out")
    assert rewards.score(trajectories("a"))[0].rewards == pytest.approx(
        {"one": 1.0, "two": 2.0, "reward_2": math.nan}, nan_ok=True
    )
    assert rewards.score(trajectories("x"))[0].rewards.keys() == {"one", "two", "c"}
    with pytest.raises(
        RewardError, match=r"returned the rewards \['d'\], before they were \['c'\]: a dictionary has ev"
    ):
        later = load(lambda completion, row: {completion: 1.0}, none="leave-out")
        later.score(trajectories("c"))
        later.score(trajectories("d"))


def centred(rewards):
    return rewards - rewards.mean(-1, keepdims=True)


def centred_in_batch(rewards):
    return rewards - rewards.mean()


def centred_of_valid(rewards, valid):
    mean = rewards.mean(-1, keepdims=True) if valid is None else rewards.mean(-1, keepdims=True, where=valid)
    return rewards - mean


def first_advantages(groups, advantage):
    objective = rl_fn.recipes.grpo().replace(kl=None, advantage=advantage)
    batch = groups.batch().with_advantages(objective)
    return batch.tokens.advantages[:, 1].view(groups.rewards.shape), batch.counted.any(1).view(groups.rewards.shape)


def test_an_own_advantage_sees_what_counts_or_is_refused():
    """By None, by a choice, or by a failure, which ends no run: then the group counts nowhere."""
    whole = groups_of([1.0, 0.0, 0.5, 1.0], [1.0, 0.5, 0.0, 0.0])
    for advantage in (centred, centred_of_valid):
        assert torch.equal(
            first_advantages(whole, advantage)[0], first_advantages(whole, rl_fn.recipes.dr_grpo().advantage)[0]
        )
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    nones = groups_of([1.0, 0.0, None, None], [1.0, 0.5, 0.0, 0.0])
    failed = [replace(t, finish_reason="error") if i in (2, 3) else t for i, t in enumerate(whole.trajectories)]
    failed = replace(whole, trajectories=failed, sampled=replace(whole.scored, trajectories=failed))
    for groups in (whole.select(mask), nones, failed):
        found, counted = first_advantages(groups, centred_of_valid)
        assert found[0].tolist() == [0.5, -0.5, 0.0, 0.0] and torch.equal(counted, mask)
    for groups in (whole.select(mask), nones):
        with pytest.raises(ValueError, match=r"centred does not take valid.*a function \(rewards, valid\)"):
            first_advantages(groups, centred)
    for advantage in (centred, centred_in_batch):
        found, counted = first_advantages(failed, advantage)
        assert not found[0].any() and not counted[0].any() and counted[1].all()
        # As if the other group were not there, in a mean over the batch, too.
        assert (
            torch.equal(found[1:], first_advantages(groups_of([1.0, 0.5, 0.0, 0.0]), advantage)[0]) and found[1].any()
        )
    every = [replace(t, finish_reason="error") if i % 4 else t for i, t in enumerate(whole.trajectories)]
    every = replace(whole, trajectories=every, sampled=replace(whole.scored, trajectories=every))
    found, counted = first_advantages(every, centred)
    assert not found.any() and not counted.any()


def test_a_kl_in_the_reward_is_measured_of_what_counts():
    objective = rl_fn.recipes.rloo().replace(kl=None, reward_kl=rl_fn.components.KL("k1", 0.1))

    def measured(groups, far):
        batch = groups.batch()
        far_from = torch.zeros(batch.tokens.mask.shape)
        far_from[far] = 40.0
        return batch.with_fields(ref_logprobs=batch.tokens.old_logprobs - 1.0 - far_from).with_advantages(objective)

    whole, nones = groups_of([1.0, 0.0, 0.5]), groups_of([1.0, 0.0, 0.5, None])
    assert measured(whole, []).metrics["reward_kl"] == pytest.approx(1.0)
    assert measured(nones, [3]).metrics["reward_kl"] == pytest.approx(1.0)
    assert measured(whole.select(torch.tensor([[True, True, False]])), [2]).metrics["reward_kl"] == pytest.approx(1.0)
    assert "reward_kl" not in measured(groups_of([None, None]), []).metrics


def test_pass_at_k_is_of_what_was_earned_before_the_overlong_penalty():
    groups = groups_of([1.0, 1.0, 0.0, None])
    penalised = groups.score(
        lambda completion, row: [1.0, 1.0, 0.0, None][int(completion)], none="leave-out", overlong_buffer=3
    )
    assert bool((penalised.rewards[0, :3] < penalised.scored.earned[0, :3]).any())
    assert penalised.held_out(pass_at=(1,))["pass@1"] == groups.held_out(pass_at=(1,))["pass@1"] == pytest.approx(2 / 3)
    assert penalised.held_out()["held_out"] < groups.held_out()["held_out"]
