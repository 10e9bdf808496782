import dataclasses
import re
from array import array

import pytest

from rl_bridge.data.trajectory import Request, SamplingParams, Span, Trajectory, requests_of, single_turn


def trajectory(**changes):
    fields = {
        "tokens": (5, 6, 7, 8, 9, 1),
        "loss_mask": (False, True, True, False, True, True),
        "logprobs": (0.0, -1.0, -2.0, 0.0, -3.0, -4.0),
        "weights_versions": (-1, 3, 3, -1, 4, 4),
        "finish_reason": "stop",
    }
    return Trajectory(**fields | changes)


def test_sampling_that_nobody_described_is_of_the_model_s_own_distribution():
    sampling = SamplingParams(max_new_tokens=1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, None, None, None)
    assert sampling.n == 1 and sampling == SamplingParams(max_new_tokens=1, temperature=1)


def test_what_the_policy_drew_over_several_turns():
    two_turns = trajectory(turns=2)
    assert two_turns.prompt_tokens == (5,) and two_turns.sampled_tokens == (6, 7, 9, 1)
    assert two_turns.sampled_logprobs == (-1.0, -2.0, -3.0, -4.0)
    nothing = trajectory(loss_mask=(False,) * 6)
    assert nothing.prompt_tokens == nothing.tokens and nothing.sampled_tokens == ()


def test_a_single_turn_is_the_prompt_and_what_was_drawn():
    made = single_turn([5, 6], [7, 1], logprobs=[-0.5, -0.25], version=3, group=2, request_id=(0, 1))
    assert made == Trajectory(
        tokens=(5, 6, 7, 1),
        loss_mask=(False, False, True, True),
        logprobs=(0.0, 0.0, -0.5, -0.25),
        weights_versions=(-1, -1, 3, 3),
        finish_reason="stop",
        request_id=(0, 1),
        group=2,
        spans=(Span((0, 1), 0, 0, 2, 3, array("i", [7, 1])),),
    )
    assert single_turn([5, 6], [7, 1]).spans == (), "nobody drew it"


def test_the_completion_is_the_policy_s_last_message_whoever_speaks_behind_it():
    question, reply = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    assert trajectory(messages=(question, reply)).completion == "2"
    assert trajectory(messages=(reply, question)).completion == "2"
    assert trajectory(messages=(reply, question), turns=0).completion == trajectory().completion == ""


def test_a_trajectory_does_not_change():
    with pytest.raises(AttributeError, match="cannot assign to field 'tokens'"):
        trajectory().tokens = ()


def test_a_labelled_trajectory_is_the_same_but_for_its_labels():
    before = trajectory(group=1, rewards={"a": 1.0}, row={"b": 2}, turns=2, stop_reason="x")
    labels = {"rewards": {}, "row": {"c": []}, "group": 0}
    for names in ((), ("rewards",), ("row", "group"), tuple(labels)):
        own = {name: labels[name] for name in names}
        assert before.labelled(**own) == dataclasses.replace(before, **own)
    assert before == trajectory(group=1, rewards={"a": 1.0}, row={"b": 2}, turns=2, stop_reason="x")
    with pytest.raises(TypeError):
        before.labelled(tokens=())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (), "loss_mask": ()}, "got 0 tokens and loss_mask ()"),
        ({"loss_mask": (False, True)}, "got 6 tokens and loss_mask (False, True)"),
        ({"loss_mask": (True,) * 6}, "False on the first; got 6 tokens and loss_mask (True, True"),
        ({"logprobs": (0.0,)}, "logprobs has 1 entries for 6 tokens"),
        ({"weights_versions": ()}, "weights_versions has 0 entries for 6 tokens"),
        ({"allowed_tokens": ((1, 2),)}, "allowed_tokens has 1 entries for 6 tokens"),
        ({"finish_reason": "eos"}, "finish_reason must be one of stop, length, turns, abort, error, got 'eos'"),
    ],
)
def test_fields_that_do_not_fit_together(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trajectory(**changes)


def test_requests_bear_the_seed_and_their_place():
    assert requests_of(["a", [1, 2]], seed=9) == [Request("a", (9, 0), 0), Request([1, 2], (9, 1), 1)]
