"""Which prompts are held out depends on the seed alone."""

import pytest

from rl_bridge.data.tasks import arithmetic_rows, split_rows

ROWS = arithmetic_rows(["+"])


def held(seed):
    return [row["prompt"] for row in split_rows(ROWS, 50, seed)[1]]


def test_the_seed_decides_what_is_held_out():
    assert held(1) == held(1)
    assert len({*held(1), *held(2)}) > 90


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_is_held_out_whatever_form_it_has(seed):
    """Tables have null where another row has a prompt, and the order of a message's keys says nothing."""
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}] for n in range(10)]
    rows = [{"prompt": None, "response": None, "messages": talk} for talk in talks]
    rows += [{"prompt": f"{n}?", "response": "a", "messages": []} for n in range(10)]
    train, held_out = split_rows(rows, 4, seed)
    assert (len(train), len(held_out)) == (16, 4)
    turned = [{"prompt": [dict(reversed(talk[0].items()))], "response": "b"} for talk in talks]
    train, held_out = split_rows([*rows[:10], *turned], 4, seed)
    assert (len(train), len(held_out)) == (12, 4)


def test_tasks_of_a_server_are_told_apart_by_what_resets_it():
    """All have one prompt: none could be held out."""
    rows = [{"prompt": "Play.", "reset": {"seed": seed}} for seed in range(6)]
    train, held_out = split_rows([*rows, *rows], 2, seed=0)
    assert len(held_out) == 2 and len(train) == 8
    assert not [row for row in train if row in held_out]
