"""The recipe's loop, against engines that write down what they were asked."""

import math
from dataclasses import replace

import pytest
import torch

import rl_fn
from rl_bridge.algorithms.completions import completions
from rl_bridge.algorithms.evaluation import evaluate
from rl_bridge.algorithms.policy_setup import PolicyConfig, require_group
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import Mesh
from rl_bridge.rewards import load
from tests.bridge.algorithms.fake_engines import ROWS, FakePolicy, FakeRollout, longest_is_best, run_loop


def first_prompt_alone(completion, row):
    return float(completion == f"{RowStream(ROWS, 7).take(1)[0]['prompt']}/0")


def test_a_step_samples_scores_compares_and_updates():
    run, policy, rollout = run_loop(longest_is_best)
    # The evaluation before, two steps, the second one's evaluation, and the one after the last step.
    assert policy.events == ["sync", "sync", "train", "sync", "train", "sync", "sync"]
    prompts, held_out = [row["prompt"] for row in RowStream(ROWS, 7).take(6)], [row["prompt"] for row in ROWS[:5]]
    drawn = [prompts[:3], prompts[3:]]
    assert [call[0] for call in rollout.calls] == [held_out] * 2 + drawn + [held_out] * 3
    steps, evaluation = [call[1] for call in rollout.calls[2:4]], rollout.calls[4][1]
    assert [sampling.seed for sampling in steps] == [7 * 1_000_003, 7 * 1_000_003 + 1]
    assert [(sampling.temperature, sampling.n) for sampling in steps] == [(0.8, 4)] * 2
    assert (evaluation.temperature, evaluation.n) == (0.0, 1)
    batch, denominator = policy.batches[0]
    assert denominator == float(batch.mask.sum()) == 3 * (1 + 2 + 3 + 4)
    group = (torch.arange(4.0) - 1.5) / torch.arange(4.0).std()
    advantages = torch.stack([row[mask].unique() for row, mask in zip(batch.advantages, batch.mask, strict=True)])
    torch.testing.assert_close(advantages[:, 0], group.repeat(3), rtol=1e-4, atol=1e-5)
    assert not batch.advantages[~batch.mask].any()
    assert torch.equal(batch.old_logprobs, batch.rollout_logprobs) and batch.ref_logprobs is None
    assert run.records[0] == {
        "reward": 1.5, "tokens": 2.5, "truncated": 0.0, "informative": 1.0, "loss": 0.5, "grad_norm": 1.0,
        "trained_tokens": 4 * (1 + 2 + 1) + 3 * 10,
    }  # fmt: skip
    assert "held_out" not in run.records[0] and run.records[1]["held_out"] == 0.0


def test_every_so_often_and_after_the_last_step_it_evaluates():
    run, _, _ = run_loop(longest_is_best, steps=3)
    assert ["held_out" in record for record in run.records] == [False, True, True]


def test_groups_without_a_difference_are_left_out():
    run, policy, _ = run_loop(first_prompt_alone, steps=1)
    assert len(policy.batches[0][0].mask) == 4
    assert policy.batches[0][1] == 1 + 2 + 3 + 4
    assert run.records[0]["informative"] == pytest.approx(1 / 3)


def test_without_dynamic_sampling_they_are_not_computed_and_still_count():
    run, policy, _ = run_loop(first_prompt_alone, rl_fn.recipes.grpo().replace(kl=None), steps=1)
    [(batch, denominator)] = policy.batches
    assert len(batch.mask) == 4 and denominator == 12.0  # GRPO counts completions
    assert run.records[0]["informative"] == pytest.approx(1 / 3)


def test_a_step_without_any_difference_makes_no_update():
    run, policy, _ = run_loop(lambda completion, row: 1.0, reference=FakePolicy())
    assert "train" not in policy.events and policy.updates == 0
    assert [record["informative"] for record in run.records] == [0.0, 0.0]


def test_more_minibatches_than_informative_rows():
    _, policy, _ = run_loop(first_prompt_alone, reference=FakePolicy(), steps=1, updates_per_step=7)
    assert policy.updates == 4
    assert [len(batch.mask) for batch, _ in policy.batches] == [1] * 4


def test_minibatches_share_the_rows():
    _, policy, _ = run_loop(longest_is_best, steps=1, updates_per_step=5)
    assert [len(batch.mask) for batch, _ in policy.batches] == [3, 3, 2, 2, 2]
    assert [denominator for _, denominator in policy.batches] == [float(b.mask.sum()) for b, _ in policy.batches]


def test_old_logprobs_are_those_of_before_the_step_s_first_update():
    _, policy, _ = run_loop(longest_is_best, updates_per_step=3, recompute_old_logprobs=True)
    assert policy.events[:7] == ["sync", "sync", "logprobs", "logprobs", "logprobs", "train", "train"]
    olds = [float(batch.old_logprobs[0, 0]) for batch, _ in policy.batches]
    assert olds == [-1.0] * 3 + [-4.0] * 3
    assert all(set(batch.rollout_logprobs[batch.mask].tolist()) == {-1.0} for batch, _ in policy.batches)


def test_the_reference_is_asked_about_every_row():
    reference = FakePolicy()
    reference.updates = 41
    run, policy, _ = run_loop(first_prompt_alone, rl_fn.recipes.grpo(), reference, steps=1)
    assert len(policy.batches[0][0].mask) == 12
    assert set(policy.batches[0][0].ref_logprobs.unique().tolist()) == {-42.0}
    assert run.state.keys() == {"policy", "rows"}


def test_the_reference_follows_the_policy_every_so_many_steps():
    class Followed(FakePolicy):
        def sync_weights(self, target, adapter=None):
            super().sync_weights(target, adapter)
            self.targets = [*getattr(self, "targets", ()), (target, self.updates)]

        def follow(self, target, share):
            assert share == 1.0
            self.sync_weights(target)

    reference = FakePolicy()
    run, policy, _ = run_loop(longest_is_best, rl_fn.recipes.grpo(), reference, 6, policy=Followed(), reference_every=2)
    assert [updates for target, updates in policy.targets if target is reference] == [2, 4]
    assert run.state.keys() == {"policy", "rows", "reference"}  # one that changes is in checkpoints
    _, policy, _ = run_loop(longest_is_best, rl_fn.recipes.grpo(), reference, 6, policy=Followed())
    assert all(target is not reference for target, _ in policy.targets)
    with pytest.raises(ValueError, match="reference_every counts steps and is at least 1, or None, got 0"):
        run_loop(longest_is_best, reference_every=0)
    for options in ({"reference_every": 1, "reference_share": 0.0}, {"reference_share": 0.5}):
        with pytest.raises(ValueError, match=r"reference[_-]share"):
            run_loop(longest_is_best, **options)


def test_statistics_of_the_batch_are_not_split_over_workers():
    for mesh in (Mesh(), Mesh(tensor=2, sequence=2)):
        run_loop(longest_is_best, rl_fn.recipes.kl_cov(), steps=1, mesh=mesh)
    run_loop(longest_is_best, rl_fn.recipes.dapo(), steps=1, mesh=Mesh(shard=2, tensor=2))
    with pytest.raises(ValueError, match="kl_cov reads statistics of the whole batch, which is split over 2 workers"):
        run_loop(longest_is_best, rl_fn.recipes.kl_cov(), steps=1, mesh=Mesh(shard=2, tensor=2))


def test_a_bad_reward_names_the_row_of_its_completion():
    with pytest.raises(ValueError, match=r"on rows, row (\d) returned nan.*completion '\1/0'"):  # of an evaluation
        run_loop(lambda completion, row: math.nan)
    with pytest.raises(ValueError, match=r"on rows, row ([5-9]) returned nan.*completion '\1/0'"):  # of a step
        run_loop(lambda completion, row: 1.0 if int(row["answer"]) < 5 else math.nan)


def test_each_completion_is_rewarded_by_the_row_of_its_prompt():
    asked = []

    def reward(completion, row):
        asked.append((completion, row["prompt"]))
        return 0.0

    run_loop(reward, steps=1)
    prompts, held_out = [row["prompt"] for row in RowStream(ROWS, 7).take(3)], [row["prompt"] for row in ROWS[:5]]
    greedy, step = ([(f"{p}/{s}", p) for p in many for s in range(n)] for many, n in ((held_out, 1), (prompts, 4)))
    assert asked == greedy * 2 + step + greedy * 3


def test_evaluation_shows_scores_and_samples():
    rollout = FakeRollout()
    rewards = load(lambda completion, row: float(row["answer"]))
    result = evaluate(completions(rollout), ROWS * 2, rewards, SamplingParams(n=2, max_new_tokens=4))
    assert result["reward"] == 4.5 and result["scores"] == [float(i) for i in range(10)] * 2
    assert len(result["samples"]) == 16
    assert result["samples"][1] == {"prompt": "1", "completion": "1/0", "answer": "1", "reward": 1.0}


SAMPLING = SamplingParams(n=2, max_new_tokens=4)
COUNTS = {"steps": 1, "prompts_per_step": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"prompts_per_step": 0},
        {"updates_per_step": 0},
        {"evaluate_every": 0},
        {"sampling_rounds": 0},
        {"pass_at": (1, 0)},
        {"critic_warmup": -1},
    ],
)
def test_counts_are_checked(options):
    with pytest.raises(ValueError, match=r"(counts must be ≥ 1|critic_warmup must be ≥ 0), got"):
        PolicyConfig(**COUNTS | {"sampling": SAMPLING} | options)


@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 8), (16, 8), (5, 1)])
def test_a_step_has_at_most_one_update_a_completion(prompts, n):
    counts = {"steps": 1, "prompts_per_step": prompts, "sampling": replace(SAMPLING, n=n)}
    assert PolicyConfig(**counts, updates_per_step=prompts * n).updates_per_step == prompts * n
    for many in (prompts * n + 1, 1000):
        with pytest.raises(ValueError, match=f"^updates_per_step={many} are parts .* {prompts} · {n} = {prompts * n}:"):
            PolicyConfig(**counts, updates_per_step=many)


@pytest.mark.parametrize(("n", "reason"), [(1, "a group needs n ≥ 2"), (3, "n=3 has none"), (4, "n=4 has one set")])
def test_groups_of_one_set_of_completions_are_refused(n, reason):
    """In a group of k all advantages are 0, and a smaller one has no set."""
    with pytest.raises(ValueError, match=reason):
        require_group(rl_fn.recipes.passk(k=4), n, "n")
    require_group(rl_fn.recipes.passk(k=4), 5, "n")
    lead = rl_fn.recipes.passk(k=4).advantages(
        rl_fn.Rollouts(torch.eye(5)[:1].numpy(), torch.ones(1, 5, 2).bool().numpy())
    )
    assert lead.advantages.any()


def test_greedy_groups_are_refused():
    with pytest.raises(ValueError, match=r"sampling\.temperature must be > 0"):
        PolicyConfig(**COUNTS, sampling=replace(SAMPLING, temperature=0.0))


def test_a_sampling_with_a_seed_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"the seed of a step is the run's --seed, and sampling has none, got 3"):
        PolicyConfig(**COUNTS, sampling=replace(SAMPLING, seed=3))
