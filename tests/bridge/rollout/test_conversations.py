import dataclasses
import random

import numpy as np
import pytest

from rl_bridge.environments import Step
from rl_bridge.rollout.conversations import Limits
from tests.bridge.rollout.sums import EOS, LIMITS, TOKENIZER, Sum, converse


def test_no_order_of_environments_and_no_batch_changes_a_trajectory():
    wanted, *_ = converse(40)
    assert {t.finish_reason for t in wanted} == {"stop", "turns", "length"}
    assert {t.turns for t in wanted} == {1, 2, 3, 4}
    for seed in range(25):
        choice = random.Random(seed)
        delays = [choice.choice([0, 1, 3, 50]) * choice.random() for _ in range(200)]
        found, *_ = converse(40, delay=delays.__getitem__, room=choice.choice([1, 2, 5, 100]))
        assert found == wanted
    assert converse(6)[0] == wanted[:6]


def test_a_row_whose_environment_thinks_leaves_the_batch_and_no_other_waits_for_it():
    slow = 3
    found, sampler, steps = converse(8, delay=lambda number: 1000 if number == slow else 0)
    without = [keys for keys in sampler.together if slow not in keys]
    assert steps.now > 1000 and len(without) == len(sampler.together) - sum(slow in keys for keys in sampler.together)
    first = next(i for i, keys in enumerate(sampler.together) if slow in keys)
    assert {key for keys in sampler.together[:first] for key in keys} == set(range(8)) - {slow}
    assert found == converse(8)[0]


@pytest.mark.parametrize("truncated", [False, True])
def test_what_is_known_of_each_token(truncated):
    found, sampler, _ = converse(12, truncated=truncated)
    for key, t in enumerate(found):
        drawn = [i for i, mine in enumerate(t.loss_mask) if mine]
        prompts = [row for row in sampler.added if row.key == key]
        assert t.turns == len(prompts) and t.request_id == (7, key) and t.group == key
        # The prompt of a turn is all tokens before, and the random numbers go on where the turn before stopped.
        for row in prompts:
            assert row.prompt == t.tokens[: len(row.prompt)] and row.seed == 100 + key
            assert row.drawn == sum(t.loss_mask[: len(row.prompt)]) and t.loss_mask[len(row.prompt)]
        t.require_sampled()
        origins = [(s.turn, s.offset, s.start, s.version, len(s.drawn)) for s in t.spans]
        assert origins == [(n, 0, len(row.prompt), 5, origins[n][-1]) for n, row in enumerate(prompts)]
        assert [i for s in t.spans for i in range(s.start, s.stop)] == drawn
        assert {s.request_id for s in t.spans} == {(7, key)}
        for i, token in enumerate(t.tokens):
            mine = i in drawn
            assert t.logprobs[i] == (-0.5 - token / 1000 if mine else 0.0)
            assert t.weights_versions[i] == (5 if mine else -1)
            if truncated:
                assert tuple(t.allowed_tokens[i]) == ((token, token + 1) if mine else ())
        assert truncated or t.allowed_tokens is None
        assert t.loss_mask[-1], "nothing stands behind the policy's last word"


@pytest.mark.parametrize("stop_texts", [(), (2, 7)], ids=["the end's token", "texts too"])
def test_the_text_is_the_tokens_and_rewards_and_states_are_a_turn_s(stop_texts):
    """A stop text stays in the text, and the token that ends the turn comes behind it."""
    for t in converse(12, stop_texts=stop_texts)[0]:
        words = [m["content"] for m in t.messages]
        assert [m["role"] for m in t.messages[:2]] == ["user", "assistant"]
        assert t.row["prompt"] == words[0] and t.turns == sum(m["role"] == "assistant" for m in t.messages)
        last = max(i for i, m in enumerate(t.messages) if m["role"] == "assistant")
        assert "".join(words[: last + 1]) == TOKENIZER.decode([x for x in t.tokens if x != EOS])
        totals = [sum(map(int, "".join(words[1 : i + 1 : 2]))) for i in range(1, last + 1, 2)]
        answered = totals if t.finish_reason != "length" else totals[:-1]
        assert t.turn_rewards == (*map(float, answered), *[0.0] * (t.turns - len(answered))) or not answered
        assert t.rewards == {"environment": float(sum(answered))}
        assert t.state_ids == (0, *(total % 3 for total in totals[:-1]))


class Sometimes(Sum):
    """Names the state where the sum is even, and never the first one."""

    def reset(self, row):
        return dataclasses.replace(super().reset(row), state_id=None)

    def step(self, messages):
        answer = super().step(messages)
        return answer if answer.reward % 2 == 0 else dataclasses.replace(answer, state_id=None)


def test_a_turn_in_no_state_is_in_none_that_another_turn_is_in():
    found = converse(24, factory=Sometimes)[0]
    named = [t.state_ids for t in found if t.state_ids]
    assert {-1, 0} < {state for states in named for state in states} and all(states[0] == -1 for states in named)
    for t, whole in zip(found, converse(24)[0], strict=True):
        totals = [int(reward) for reward in t.turn_rewards[: t.turns - 1]]
        states = (-1, *(-1 if total % 2 else total % 3 for total in totals))
        assert t.state_ids == (states if any(state >= 0 for state in states) else ())
        assert t.tokens == whole.tokens


def test_how_a_conversation_ends():
    for t in converse(24)[0]:
        total = sum(map(int, "".join(m["content"] for m in t.messages if m["role"] == "assistant")))
        if t.finish_reason == "stop":
            assert t.tokens[-1] == EOS and total > 40
        elif t.finish_reason == "turns":
            assert t.tokens[-1] == EOS and t.turns == LIMITS.max_turns
        else:
            assert t.finish_reason == "length" and t.tokens[-1] != EOS and all(t.loss_mask[-6:])


def test_one_turn_is_one_turn():
    found, *_ = converse(40, limits=Limits(max_turns=1, turn_tokens=6))
    assert {t.turns for t in found} == {1} and {t.finish_reason for t in found} == {"turns", "length"}
    assert all(t.rewards for t in found if t.finish_reason == "turns")


@pytest.mark.parametrize("budget", [7, 9, 14, 23])
def test_a_trajectory_keeps_its_budget_of_tokens(budget):
    wanted = converse(24)[0]
    found, *_ = converse(24, limits=Limits(max_turns=4, turn_tokens=6, all_tokens=budget))
    assert budget - 4 < max(len(t.tokens) for t in found) <= budget
    for t, whole in zip(found, wanted, strict=True):
        assert t.tokens == whole.tokens[: len(t.tokens)]
        assert t.finish_reason == ("length" if len(t.tokens) < len(whole.tokens) else whole.finish_reason)


def test_an_opening_beyond_the_budget_draws_nothing():
    (t, *_), *_ = converse(1, limits=Limits(max_turns=4, turn_tokens=6, all_tokens=4))
    assert (t.finish_reason, t.turns, any(t.loss_mask)) == ("length", 0, False)


def failing(when, error):
    class Fails(Sum):
        def reset(self, row):
            self.number = int(row["prompt"].partition("+")[0])
            if when == "reset" and self.number == 2:
                raise error
            return super().reset(row)

        def step(self, messages):
            if when == "step" and self.number == 2:
                raise error
            return super().step(messages)

    return Fails


@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_environment_that_raises_ends_its_own_trajectory_and_names_the_row(when, caplog):
    found, *_ = converse(8, factory=failing(when, KeyError("lost")))
    wanted = converse(8)[0]
    assert found[2].finish_reason == "error" and found[2].turns == (when == "step")
    assert found[2].tokens == ((EOS,) if when == "reset" else wanted[2].tokens[: len(found[2].tokens)])
    assert [t for i, t in enumerate(found) if i != 2] == [t for i, t in enumerate(wanted) if i != 2]
    (record,) = caplog.records
    assert f"data.jsonl, row 3, turn {int(when == 'step')}: KeyError: 'lost'" in record.getMessage()


def test_if_every_environment_fails_the_run_ends_with_the_cause():
    def make():
        raise OSError("no server")

    with pytest.raises(ValueError, match=r"failed in all 4 conversations; data.jsonl, row 1, turn 0: OSError: no serv"):
        converse(4, factory=make)


@pytest.mark.parametrize(
    "answer, said",
    [
        ("4", "returned '4', expected a Step"),
        (Step(messages=[{"role": "tool"}]), "expected a list of role and content, both text"),
        (Step(messages="4"), "expected a list of role and content, both text"),
        (Step(reward=float("nan")), "gave the reward nan, expected a finite number or None"),
        (Step(reward="1"), "gave the reward '1', expected a finite number or None"),
        (Step(state_id=-1), "gave the state -1, expected an integer ≥ 0 or None"),
        (Step(done="no"), "gave done='no', expected True or False"),
        (Step(done=[]), r"gave done=\[\], expected True or False"),
        (Step(done=np.array([True, False])), r"gave done=array\(\[ True, False\]\), expected True or False"),
        (Step(messages=[{"role": "tool", "content": "x"}]), "cannot encode 'x'|cannot encode '<eos>x'"),
    ],
)
def test_nonsense_from_an_environment_is_its_error(answer, said):
    class Nonsense(Sum):
        def step(self, messages):
            return answer

    with pytest.raises(ValueError, match=said):
        converse(4, factory=Nonsense, limits=Limits(max_turns=4, turn_tokens=100))


@pytest.mark.parametrize("answer", [[], "text", Step(), Step(messages=[{"role": "user", "content": "1"}], done=True)])
def test_nonsense_as_an_opening_is_an_error(answer):
    class Nonsense(Sum):
        def reset(self, row):
            return answer

    with pytest.raises(ValueError, match=r"failed in all 4 conversations; .*reset\(\)"):
        converse(4, factory=Nonsense)


@pytest.mark.parametrize(
    "tools", ["add", {"type": "function"}, 3, map(str, ())], ids=lambda tools: type(tools).__name__
)
def test_an_environment_s_tools_are_a_list(tools):
    """Of a text each letter was a tool, of one schema each key."""

    class Nonsense(Sum):
        def __init__(self):
            super().__init__()
            self.tools = tools

    with pytest.raises(ValueError, match=r"has the tools .*, expected a list of JSON schemas or None"):
        converse(4, factory=Nonsense)


def test_what_an_environment_changes_is_its_own():
    class Careless(Sum):
        def reset(self, row):
            answer = super().reset(row)
            row.clear()
            return answer

        def step(self, messages):
            answer = super().step(messages)
            messages[0]["content"] = "0"
            messages.clear()
            return answer

    assert converse(8, factory=Careless)[0] == converse(8)[0]


def test_every_environment_is_closed_and_one_that_cannot_be_is_named(caplog):
    closed = []

    class Closing(Sum):
        def close(self):
            closed.append(self)
            if len(closed) == 2:
                raise OSError("busy")

    assert converse(5, factory=Closing)[0] == converse(5)[0]
    assert len(set(closed)) == 5
    assert [r.getMessage() for r in caplog.records] == ["closing an environment failed: OSError: busy"]


def test_no_conversations():
    assert converse(0)[0] == []


@pytest.mark.parametrize("changes", [{"max_turns": 0}, {"turn_tokens": 0}, {"all_tokens": 1}])
def test_limits_that_leave_no_turn_are_refused(changes):
    with pytest.raises(
        ValueError, match=r"a conversation has a turn, and a turn a token: got|a whole conversation has two"
    ):
        Limits(**{"max_turns": 1, "turn_tokens": 1, **changes})


@pytest.mark.parametrize("done", [True, False])
def test_the_completion_is_the_policy_s_whatever_role_the_environment_speaks_in(done):
    """An environment that speaks as an assistant, as another player of a game does, writes no completion."""

    class Speaks(Sum):
        def step(self, messages):
            return Step(messages=[{"role": "assistant", "content": "12+34"}], done=done, reward=1.0)

    trajectories, *_ = converse(16, factory=Speaks)
    assert {t.finish_reason for t in trajectories} >= ({"stop"} if done else {"turns"})
    for trajectory in trajectories:
        last = trajectory.spans[-1]
        text = TOKENIZER.decode([token for token in last.drawn if token != EOS])
        assert trajectory.completion == trajectory.messages[trajectory.last_turn]["content"] == text
