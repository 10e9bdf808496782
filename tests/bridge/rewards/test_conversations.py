"""Conversations with an environment, as reward functions of other libraries get them."""

from dataclasses import replace

import pytest

from rl_bridge.rewards import RewardError, load
from tests.support.reward_batches import rows, trajectories


def said(*words):
    """Messages of these roles and contents: ``tool:4``."""
    return [dict(zip(("role", "content"), word.split(":"), strict=True)) for word in words]


# What an environment opens with, what is said behind that, and how many of these messages the response has.
OPENINGS = {"a prompt": ["user:1+1="], "shots": ["system:count", "user:1", "assistant:2", "user:3"]}
CONVERSATIONS = {
    "one turn": (["assistant:2"], 1),
    "one turn, answered": (["assistant:2", "user:right"], 1),
    "a tool": (["assistant:call", "tool:4", "assistant:2"], 3),
    "a tool, answered": (["assistant:call", "tool:4", "assistant:2", "tool:5"], 3),
    "a user": (["assistant:1", "user:no", "assistant:3", "user:no", "assistant:2"], 5),
    "an assistant that is not the policy": (["assistant:1", "assistant:a hint", "assistant:2"], 3),
    "no turn": ([], 0),  # an environment that failed at once
}


@pytest.mark.parametrize("prompt", ["1+1=", None, [{"role": "user", "content": "1+1="}]], ids=["text", "none", "chat"])
@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_rewards_of_trl_and_verl_get_the_whole_response_of_a_conversation(conversation, opening, prompt):
    """They got the policy's last message: a reward that looked for a tool's was 0 for all."""
    spoken, length = CONVERSATIONS[conversation]
    before = said(*OPENINGS[opening])
    own = tuple(
        len(before) + place
        for place, word in enumerate(spoken)
        if word.startswith("assistant") and not word.endswith("hint")
    )
    (made,) = trajectories("", data=[{"prompt": prompt or "", "answer": "2"}])
    row = {"answer": "2"} if prompt is None else {"prompt": prompt, "answer": "2"}
    messages = tuple(before + said(*spoken))
    talk = replace(made, row=row, messages=messages, turn_messages=own, turns=len(own))
    got = []

    def of_trl(completions, **columns):
        got.extend(completions)
        return [0.0]

    def of_verl(data_source, solution_str, ground_truth, extra_info):
        got.append(solution_str)
        return 0.0

    load([of_trl, of_verl]).score([talk])
    response = said(*(spoken[:length] or ["assistant:"]))  # rewards index the first message and the last one
    assert got == [response, "\n".join(message["content"] for message in response)]


def test_single_turns_without_an_environment_stay_text_or_one_message():
    """Assistants that speak in a prompt are not the policy."""
    shots = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    (text,) = trajectories("4", data=[{"prompt": "3", "answer": "4"}])
    chat = replace(text, row={"prompt": shots}, messages=(*shots, {"role": "assistant", "content": "4"}))
    got = []

    def of_trl(completions):
        got.extend(completions)
        return [0.0] * len(completions)

    def of_verl(data_source, solution_str, ground_truth, extra_info):
        got.append(solution_str)
        return 0.0

    load([of_trl, of_verl]).score([text, chat])
    assert got == ["4", said("assistant:4"), "4", "4"]


def test_a_reward_of_trl_for_conversations_is_tried_on_messages():
    def answers(completions, answer):
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    load(answers).try_on(rows(2), conversations=True)
    with pytest.raises(RewardError, match=r"answers on .* raised TypeError"):
        load(answers).try_on(rows(2))
