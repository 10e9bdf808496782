"""An argument that nothing would read is refused by name, and so is one that is no value of its kind."""

import pytest

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Ahead,
    Critic,
    Groups,
    Policy,
    Reference,
    Rollout,
    Rows,
    SamplingParams,
    load_rows,
    preference_loss,
)
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.rewards import load

GRPO, PPO = rl_fn.recipes.grpo().replace(kl=None), rl_fn.recipes.ppo()
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in PROMPTS]
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)


def reward(completion, row):
    return completion.count("1") - len(completion)


@pytest.fixture(scope="module")
def rollout(model):
    with Rollout(model) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def groups(rollout):
    return rollout.generate(PROMPTS[:2], SAMPLING).score(reward)


@pytest.fixture(scope="module")
def policy(model):
    with Policy(model, GRPO, AdamW(1e-3)) as policy:
        yield policy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decay": "cosine"}, "total=updates"),
        ({"decay": "linear"}, "total=updates"),
        ({"final": 0.5}, "total=updates"),
        ({"decay": "cosin", "total": 9}, "decay is one of constant, linear, cosine, got 'cosin'"),
        ({"decay": "cosin"}, "decay is one of"),
        ({"learning_rate": float("inf")}, "finite"),
        ({"decay": "constant", "total": 9, "final": 0.5}, "final=0.5 has no effect with decay constant"),
        ({"initial": 0.5, "warmup": 0}, "initial=0.5 has no effect without a warmup"),
    ],
    ids=str,
)
def test_a_schedule_that_would_not_be_the_asked_one_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        AdamW(**{"learning_rate": 1e-3, **options})


def test_a_schedule_is_the_asked_one():
    assert AdamW(1e-3, decay="constant").decay == AdamW(1e-3, decay="constant", total=9).decay == "constant"
    assert AdamW(1e-3, decay="cosine", total=9, final=0.5).scale(8 + 10, 9) == 0.5


@pytest.mark.parametrize("options", [{"updates": 4}, {"updates": 0}, {"stale": True}], ids=str)
@pytest.mark.parametrize("kind", ["rows", "comparisons"])
def test_rows_and_comparisons_are_one_update_each(options, kind, model):
    loss, rows = (NLL(), PROMPTS) if kind == "rows" else (preference_loss("simpo"), PAIRS)
    batch = load_rows(rows, model, loss).batch(4)
    with Policy(model, loss, AdamW(1e-3)) as policy:
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* has no effect with"):
            policy.update(batch, **options)
        assert policy.engine.call("weights_version") == 0
        policy.update(batch)
        assert policy.engine.call("weights_version") == 1


@pytest.mark.parametrize("options", [{"fused_loss": True}, {"least_effective_share": 0.9}], ids=str)
@pytest.mark.parametrize("loss", [NLL(), preference_loss("simpo")], ids=["rows", "comparisons"])
def test_what_is_of_groups_alone_is_refused_for_other_losses(options, loss, model):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* has no effect with"):
        Policy(model, loss, AdamW(1e-3), **options)


@pytest.mark.parametrize("updates", [-1, 1.5, "2"])
def test_updates_are_counted(updates, groups, policy, model):
    batch = groups.batch().with_advantages(GRPO)
    for call in (policy.update, policy.score):
        with pytest.raises(ValueError, match="updates is the number"):
            call(batch, updates=updates)
    with Critic(model, PPO, AdamW(1e-3)) as critic:
        valued = critic.score(groups.batch()).with_advantages(PPO)
        for count in (updates, 0):
            with pytest.raises(ValueError, match="updates is the number"):
                critic.update(valued, updates=count)


def test_a_loss_of_rewards_trains_no_policy_and_reads_no_log_probabilities(model):
    loss = preference_loss("bradley_terry")
    with pytest.raises(ValueError, match="bradley_terry is of rewards"):
        Policy(model, loss, AdamW(1e-3))
    for name in ("bradley_terry", "plackett_luce"):
        for options in ({"wpo": True}, {"average": True}, {"average": False}):
            with pytest.raises(ValueError, match=f"{name} reads rewards"):
                preference_loss(name, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 3}, "max_length=3 has no effect"),
        ({"apply_chat_template": False}, "apply_chat_template=False has no effect"),
        ({"new_tokens": 9}, "new_tokens=9 has no effect"),
        ({"new_tokens": 9, "loss": NLL()}, "new_tokens=9 has no effect"),
    ],
    ids=["length", "template", "without a model", "with a loss"],
)
def test_how_rows_are_encoded_is_refused_where_none_is(options, words, model):
    with pytest.raises(ValueError, match=words):
        load_rows(PROMPTS, model if "loss" in options else None, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward": load(reward), "weights": [2.0]}, r"weights=\(2.0,\) has no effect with Rewards"),
        ({"reward": load(reward), "none": "leave-out"}, "none='leave-out' has no effect with Rewards"),
        ({"none": "leaveout"}, "none is one of refuse, leave-out, got 'leaveout'"),
        ({"weights": [float("nan")]}, "weights of rewards are finite"),
        ({"weights": [float("inf")]}, "weights of rewards are finite"),
    ],
    ids=["weights of Rewards", "none of Rewards", "none", "nan", "inf"],
)
def test_how_rewards_are_made_acts_or_is_refused(options, words, groups):
    with pytest.raises(ValueError, match=words):
        groups.score(**{"reward": reward, **options})


@pytest.mark.parametrize("source", [None, 3])
def test_what_is_no_reward_is_refused_as_one(source, groups):
    with pytest.raises(TypeError, match="a reward is a function"):
        groups.score(source)


def test_rho_is_of_tchebycheff():
    with pytest.raises(ValueError, match=r"rho 0\.5 has no effect"):
        ScalarOptions(rho=0.5)
    assert ScalarOptions(rho=0.5, method="tchebycheff", ideal=(1.0,)).rho == 0.5


@pytest.mark.parametrize("coefficients", [{"klx": 1.0}, {"kl": 1.0}, {"reward_kl": 1.0}, {"loss": 1.0}], ids=str)
def test_a_coefficient_is_of_a_term_that_the_objective_has(coefficients, groups):
    with pytest.raises(ValueError, match=f"grpo has no term '{next(iter(coefficients))}'"):
        groups.batch().with_advantages(GRPO, coefficients=coefficients)


def test_limits_of_conversations_are_refused_without_any(model, policy, rollout):
    limits = {"max_turns": 8, "max_tokens": 9, "step_timeout": 1.0, "processes": 2, "parse": len}
    for name, value in limits.items():
        with pytest.raises(ValueError, match=f"{name}=.* has no effect without an environment or tools"):
            Ahead(rollout, policy, Rows(PROMPTS), reward, SAMPLING, prompts=2, steps=1, **{name: value})
        rollout.ahead = None
    with pytest.raises(ValueError, match=r"parse=.* has no effect with an environment"):
        rollout.converse(PROMPTS[:1], SAMPLING, object, parse=len)


@pytest.mark.parametrize("count", [-1, 2.5, "3", None])
def test_rows_are_taken_by_their_number(count):
    with pytest.raises(ValueError, match="whole and not negative"):
        Rows(PROMPTS).take(count)


@pytest.mark.parametrize("rows", [["1+1="], {"prompt": "1+1="}, [None]], ids=["texts", "one row", "None"])
def test_what_is_no_row_is_named(rows, rollout):
    with pytest.raises(ValueError, match="row 1: a row is an object with columns"):
        rollout.generate(rows, SAMPLING)


def test_groups_that_are_no_batch_yet_are_refused_with_the_call_that_makes_one(model, groups, policy):
    with Reference(model) as reference, Critic(model, PPO, AdamW(1e-3)) as critic:
        for scorer in (policy, reference, critic):
            with pytest.raises(TypeError, match=r"not a Groups: groups\.batch\(\) makes one"):
                scorer.score(groups)
            with pytest.raises(TypeError, match="not a TokenBatch"):
                scorer.score(groups.batch().tokens)
    for other in (NLL(), rl_fn.recipes.grpo):
        with pytest.raises(TypeError, match="advantages are of an objective"):
            groups.batch().with_advantages(other)
    with pytest.raises(ValueError, match="no groups to join"):
        Groups.joined([])
