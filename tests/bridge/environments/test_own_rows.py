"""SURV-3: an environment has its row and the messages of a step for itself, whatever it does to them."""

import asyncio
import copy

import pytest

from rl_bridge.environments import Step
from rl_bridge.environments.environment import Session


class Spoils:
    """Changes all that it is given, also inside."""

    def reset(self, row):
        row["answer"], row["prompt"] = "spoilt", row["prompt"] + "!"
        row["cases"].append(4)
        row["about"]["seen"] = True
        return [{"role": "user", "content": row.pop("prompt")}]

    def step(self, messages):
        messages[0]["content"] = "spoilt"
        messages.clear()
        return Step(messages=[], done=True)


class SpoilsLater(Spoils):
    async def reset(self, row):
        await asyncio.sleep(0)
        return super().reset(row)

    async def step(self, messages):
        await asyncio.sleep(0)
        return super().step(messages)


def ended(answer):
    async def awaited():
        return await answer

    return asyncio.run(awaited()) if asyncio.iscoroutine(answer) else answer


@pytest.mark.parametrize("environment", [Spoils, SpoilsLater])
def test_the_row_that_rewards_and_other_completions_read_is_never_the_environment_s(environment):
    row = {"prompt": "1+1?", "answer": "2", "cases": [1, 2, 3], "about": {"seen": False}}
    before, openings = copy.deepcopy(row), []
    for _ in range(2):  # the completions of a group, or two epochs
        session = Session(environment)
        openings.append(ended(session.reset(row)).messages)
        messages = ({"role": "assistant", "content": "2"},)
        ended(session.step(messages))
        assert messages == ({"role": "assistant", "content": "2"},)
    assert row == before and openings[0] == openings[1] == [{"role": "user", "content": "1+1?!"}]


class Cuts:
    """Opens or answers with a text that was cut in a character."""

    def __init__(self, place):
        self.place = place

    def reset(self, row):
        return [{"role": "user", "content": "\ud83d" if self.place == "reset" else "1"}]

    async def step(self, messages):
        return Step(messages=[{"role": "tool", "content": "1"}, {"role": "tool", "content": "2\ude00"}])


@pytest.mark.parametrize("place, where", [("reset", r"reset\(\)\.messages\[0\]"), ("step", r"step\(\)\.messages\[1\]")])
def test_half_of_a_character_is_this_conversation_s_failure(place, where):
    session = Session(lambda: Cuts(place))
    with pytest.raises(ValueError, match=rf"{where}\.content: half of a surrogate pair"):
        session.reset({})
        asyncio.run(session.step([]))
