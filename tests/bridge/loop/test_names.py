"""The public names of rl_bridge: each is there, documented, and loaded when asked for; what does not fit is refused."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

import rl_bridge
import rl_fn
from rl_bridge.data.trajectory import single_turn
from rl_bridge.loop.groups import loaded_rewards

SAMPLING = rl_bridge.SamplingParams(n=2, max_new_tokens=2, seed=3)


def completion(group, token):
    """A prompt of one token and a completion of one."""
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": str(token)})
    return single_turn([5], [token], logprobs=[-1.0], group=group, messages=messages, row={"prompt": "x"})


@pytest.fixture
def groups():
    """Two prompts of two completions."""
    trajectories = [completion(group, token) for group in (0, 1) for token in (6, 7)]
    return rl_bridge.Groups(trajectories=trajectories, sampling=SAMPLING, pad_token=0)


@pytest.mark.parametrize("name", rl_bridge.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name):
    assert (getattr(rl_bridge, name).__doc__ or "").strip()


def test_the_table_of_places_has_each_name_once():
    assert sorted(name for names in rl_bridge._PLACES.values() for name in names) == sorted(rl_bridge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Polcy'"):
        _ = rl_bridge.Polcy


def test_the_package_alone_loads_neither_torch_nor_jax():
    script = "import sys, rl_bridge; print(*({'torch', 'jax', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_groups_have_rewards_once_they_are_scored(groups):
    for read in (lambda: groups.rewards, groups.batch, groups.metrics):
        with pytest.raises(ValueError, match=r"groups\.score\(reward\)"):
            read()
    scored = groups.score(lambda completion, row: float(completion))
    assert torch.equal(scored.rewards, torch.tensor([[6.0, 7.0], [6.0, 7.0]])) and bool(scored.valid.all())
    assert scored.metrics()["reward"] == 6.5


def test_several_rewards_have_weights(groups):
    def one(completion, row):
        return 1.0

    def number(completion, row):
        return float(completion)

    scored = groups.score([one, number], (2.0, 0.5))
    assert torch.equal(scored.rewards, torch.tensor([[5.0, 5.5], [5.0, 5.5]]))
    assert scored.metrics()["reward/number"] == 6.5


def test_advantages_compare_the_completions_of_a_prompt(groups):
    batch = groups.score(lambda completion, row: float(completion)).batch()
    batch = batch.with_advantages(rl_fn.recipes.rloo())
    assert batch.tokens.advantages[:, 1].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert batch.computed.all() and batch.counted[:, 1].all() and batch.metrics["informative"] == 1.0


def test_groups_are_joined_and_selected_prompt_by_prompt(groups):
    first = groups.score(lambda completion, row: float(completion))
    second = replace(groups, sampling=replace(SAMPLING, seed=4)).score(lambda completion, row: 1.0)
    both = rl_bridge.Groups.joined([first, second])
    assert both.rewards.tolist() == [[6.0, 7.0], [6.0, 7.0], [1.0, 1.0], [1.0, 1.0]]
    assert [t.group for t in both.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3] and both.scored.sampled_groups == 4
    chosen = both.select((both.rewards.std(1) > 0).nonzero()[:, 0])
    assert chosen.rewards.tolist() == first.rewards.tolist() and both.select([3, 0]).rewards[0].tolist() == [1.0, 1.0]
    expected = first.batch().with_advantages(rl_fn.recipes.rloo()).tokens
    assert torch.equal(chosen.batch().with_advantages(rl_fn.recipes.rloo()).tokens.advantages, expected.advantages)
    hotter = replace(first, sampling=replace(SAMPLING, temperature=0.5))
    with pytest.raises(ValueError, match=r"sampled and scored alike.*temperature=0\.5"):
        rl_bridge.Groups.joined([first, hotter])


PLACES = {
    "a list of bools": lambda mask: mask.tolist(),
    "a tensor": lambda mask: mask,
    "numpy": lambda mask: mask.numpy(),
    "its places": lambda mask: mask.nonzero()[:, 0],
    "a column of places": lambda mask: mask.nonzero(),
    "a list of places": lambda mask: mask.nonzero()[:, 0].tolist(),
    "places from the end": lambda mask: mask.nonzero()[:, 0] - len(mask),
}


@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("chosen", [[True, False, True], [False, True, True], [True] * 3, [False] * 3], ids=str)
def test_a_mask_selects_what_its_places_select(form, chosen):
    drawn = [completion(group, token) for group in range(3) for token in (6 + group, 7 + group)]
    groups = rl_bridge.Groups(trajectories=drawn, sampling=SAMPLING, pad_token=0)
    scored = groups.score(lambda completion, row: float(completion))
    selected = scored.select(PLACES[form](torch.tensor(chosen)))
    assert selected.rewards.tolist() == [[6.0 + g, 7.0 + g] for g in range(3) if chosen[g]]
    part = slice(None, chosen[0] + 1)
    assert scored.select(part).rewards.tolist() == scored.rewards[part].tolist()
    assert [t.completion for t in selected.trajectories] == [
        str(n) for g in range(3) if chosen[g] for n in (6 + g, 7 + g)
    ]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([True], "one entry for each of the 2 prompts, got 1"),
        (torch.tensor([0.0, 1.0]), "places or a mask of True and False, got torch.float32"),
        ([0, 0], "place 0 is chosen twice"),
        ([0, -2], "place 0 is chosen twice"),
        ([2], "no prompt at place 2: the places are 0 to 1"),
        (torch.zeros(2, 3, dtype=torch.bool), r"a mask \[2\] of prompts or one of all .*, got the shape \[2, 3\]"),
        (torch.zeros(2, 2), r"got the shape \[2, 2\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_selects_no_prompts_is_refused(groups, prompts, words):
    with pytest.raises((TypeError, ValueError), match=words):
        groups.score(lambda completion, row: 1.0).select(prompts)


def test_no_prompts_are_no_batch(groups):
    nothing = groups.score(lambda completion, row: 1.0).select([])
    assert nothing.rewards.shape == (0, 2)
    with pytest.raises(ValueError, match=r"select left none of the prompts\. A step without an update is logged"):
        nothing.batch()


def test_a_reward_is_loaded_once_whether_or_not_it_can_be_hashed(groups):
    @dataclass
    class Length:
        scale: float

        def __call__(self, completion, row):
            return self.scale * float(completion)

    for reward in (Length(1.0), [Length(1.0), "exact"]):
        assert loaded_rewards(reward) is loaded_rewards(reward)
    first, equal, other = Length(1.0), Length(1.0), Length(2.0)
    assert loaded_rewards(first) is not loaded_rewards(equal)
    assert groups.score(other).rewards.tolist() == [[12.0, 14.0]] * 2
    assert groups.score([first, other]).rewards.tolist() == [[18.0, 21.0]] * 2


def test_an_evaluation_is_the_mean_with_its_interval_and_pass_at_k(groups):
    scored = groups.score(lambda completion, row: float(completion == "7"))
    metrics = scored.held_out(pass_at=(1, 2))
    assert metrics["held_out"] == metrics["pass@1"] == 0.5 and metrics["pass@2"] == 1.0
    assert metrics["held_out_low"] <= 0.5 <= metrics["held_out_high"]
    with pytest.raises(ValueError, match="pass@3 needs 3 completions a prompt, got 2"):
        scored.held_out(pass_at=(3,))


def test_rows_that_are_held_out_share_no_prompt_with_the_others():
    rows = rl_bridge.Rows([{"prompt": str(number % 7), "answer": number} for number in range(12)], seed=3)
    train, held_out = rows.hold_out(2)
    trained = {row["prompt"] for row in train.take(len(train))}
    assert len(held_out) == 2 and not trained & {row["prompt"] for row in held_out} and len(trained) == 5
    assert rows.hold_out(2)[1] == held_out
    with pytest.raises(ValueError, match="cannot hold out 7 distinct prompts"):
        rows.hold_out(7)
    with pytest.raises(ValueError, match="hold_out is for prompts"):
        rl_bridge.Rows([1, 2], collate=list, fingerprint="1").hold_out(1)


@pytest.mark.parametrize(
    "of",
    [
        lambda task: {"task": task},
        lambda task: {"prompt": {"task": task}},
        lambda task: {"prompt": "", "task": task},
        lambda task: {"messages": {"task": task}},
    ],
    ids=["no prompt", "a prompt that is no text", "an empty prompt", "messages that are none"],
)
def test_rows_of_an_environment_s_own_are_held_out_whole(of):
    """They have no prompt that two rows could share: the row itself is what is held out."""
    rows = [of(task) for task in (1, 2, 2, 3)]
    train, held_out = rl_bridge.Rows(rows, seed=1).hold_out(1)
    assert len(held_out) == 1 and held_out[0] not in train.take(len(train))
    assert len(train) == 4 - rows.count(held_out[0])
    with pytest.raises(ValueError, match="cannot hold out 3 distinct prompts"):
        rl_bridge.Rows(rows).hold_out(3)


def test_an_input_that_no_model_has_given_is_refused_with_the_call_that_gives_it(groups):
    batch = groups.score(lambda completion, row: float(completion)).batch()
    objective = rl_fn.recipes.grpo().replace(kl=None, reward_kl=rl_fn.components.KL("k1", 0.02))
    with pytest.raises(ValueError, match=r"reads ref_logprobs, which reference\.score\(batch\) gives"):
        batch.with_advantages(objective)
    with pytest.raises(ValueError, match=r"reads values, which critic\.score\(batch\) gives"):
        batch.with_advantages(rl_fn.recipes.ppo())
    with pytest.raises(ValueError, match=r"reads teacher_logprobs, which teacher\.score\(batch\) gives"):
        batch.with_advantages(rl_fn.recipes.on_policy_distillation())
    with pytest.raises(ValueError, match=r"reads greedy_rewards, which groups\.score\(reward, greedy=rollout"):
        batch.with_advantages(rl_fn.recipes.remax())


def test_a_greedy_baseline_is_of_the_same_prompts(groups):
    def number(completion, row):
        return float(completion)

    greedy = replace(SAMPLING, n=1, temperature=0.0)
    baseline = rl_bridge.Groups(trajectories=[completion(0, 6), completion(1, 8)], sampling=greedy, pad_token=0)
    batch = groups.score(number, greedy=baseline).batch().with_advantages(rl_fn.recipes.remax())
    assert batch.tokens.advantages[:, 1].tolist() == [0.0, 1.0, -2.0, -1.0]
    assert groups.score(number, greedy=baseline).select([1]).scored.greedy_rewards.tolist() == [8.0]
    for wrong, words in (
        (replace(baseline, sampling=replace(greedy, temperature=1.0)), "got n=1 at temperature 1.0"),
        (replace(groups, sampling=replace(SAMPLING, temperature=0.0)), "got n=2 at temperature 0.0"),
        (replace(baseline, trajectories=baseline.trajectories[:1]), "are of other prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            groups.score(number, greedy=wrong)


def test_the_optimiser_s_rate_decays_to_its_total_or_stays():
    assert rl_bridge.AdamW(0.1).decay == "constant" and rl_bridge.AdamW(0.1, total=9).decay == "linear"
    with pytest.raises(ValueError, match="total"):
        rl_bridge.AdamW(0.1, total=0)


def test_a_loss_of_another_name_or_constant_is_refused():
    for arguments in ({"name": "dop"}, {"name": "dpo", "gamma": 1.0}):
        with pytest.raises(ValueError, match=r"dop|gamma"):
            rl_bridge.preference_loss(**arguments)


def test_prompts_are_no_batch_and_rows_for_a_loss_need_a_model():
    with pytest.raises(ValueError, match="these rows are prompts"):
        rl_bridge.Rows([{"prompt": "x"}]).batch(1)
    with pytest.raises(ValueError, match="encoded for a model"):
        rl_bridge.load_rows("rows.jsonl", None, rl_bridge.NLL())


def test_a_run_needs_a_state():
    with pytest.raises(ValueError, match="state"):
        rl_bridge.Run("run", [])
