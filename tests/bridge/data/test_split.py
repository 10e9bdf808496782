"""Which prompts are held out depends on the seed alone."""

from rl_bridge.data.tasks import arithmetic_rows, split_rows

ROWS = arithmetic_rows(["+"])


def held(seed):
    return [row["prompt"] for row in split_rows(ROWS, 50, seed)[1]]


def test_the_seed_decides_what_is_held_out():
    assert held(1) == held(1)
    assert len({*held(1), *held(2)}) > 90
