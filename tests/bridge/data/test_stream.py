import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.rows import RowStream
from rl_bridge.data.tasks import arithmetic_rows, split_rows


def rows(count):
    return [{"prompt": str(i)} for i in range(count)]


def names(taken):
    return [int(row["prompt"]) for row in taken]


@given(count=st.integers(1, 12), cuts=st.lists(st.integers(0, 30), max_size=6), seed=st.integers(0, 5))
def test_every_row_once_an_epoch_however_it_is_taken(count, cuts, seed):
    stream, whole = RowStream(rows(count), seed), RowStream(rows(count), seed)
    taken = [name for cut in cuts for name in names(stream.take(cut))]
    assert taken == names(whole.take(sum(cuts)))
    for start in range(0, len(taken) - count + 1, count):
        assert sorted(taken[start : start + count]) == list(range(count))
    assert max(Counter(taken).values(), default=0) <= -(-len(taken) // count)


def test_an_epoch_is_shuffled_anew_and_a_seed_is_an_order():
    first, second = (names(RowStream(rows(50), seed).take(100)) for seed in (0, 1))
    assert first[:50] != first[50:] != list(range(50))
    assert first != second
    assert first == names(RowStream(rows(50), 0).take(100))


@given(count=st.integers(1, 9), before=st.integers(0, 25), after=st.integers(0, 25))
def test_a_saved_place_goes_on_where_it_was(count, before, after):
    stream = RowStream(rows(count), 3)
    stream.take(before)
    state = json.loads(json.dumps(stream.checkpoint_state()))
    wanted = names(stream.take(after))
    resumed = RowStream(rows(count), 3)
    resumed.load_checkpoint_state(state)
    assert names(resumed.take(after)) == wanted


@pytest.mark.parametrize("other", [RowStream(rows(4), 0), RowStream(rows(5), 1)])
def test_a_place_in_other_data_is_refused(other):
    with pytest.raises(ValueError, match=r"made on 5 rows with seed 0, this run has \d rows and seed \d"):
        other.load_checkpoint_state(RowStream(rows(5), 0).checkpoint_state())


def test_no_rows():
    with pytest.raises(ValueError, match="no rows to train on"):
        RowStream([], 0)


@given(
    prompts=st.lists(st.integers(0, 8), min_size=4, max_size=30),
    held_out=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_a_split_shares_no_prompt_even_with_duplicates(prompts, held_out, seed):
    data = [{"prompt": [{"role": "user", "content": str(p)}], "answer": i} for i, p in enumerate(prompts)]
    distinct = len(set(prompts))
    if distinct <= held_out:
        with pytest.raises(ValueError, match=f"cannot hold out {held_out} distinct prompts of {len(data)} rows"):
            split_rows(data, held_out, seed)
        return
    train, held = split_rows(data, held_out, seed)
    assert len(held) == held_out
    in_train, in_held = ({row["prompt"][0]["content"] for row in part} for part in (train, held))
    assert not in_train & in_held
    assert in_train | in_held == {str(p) for p in prompts}
    assert len(in_held) == held_out
    # Every row whose prompt is not held out is trained on.
    assert sorted(row["answer"] for row in train) == [i for i, p in enumerate(prompts) if str(p) not in in_held]
    assert split_rows(data, held_out, seed) == (train, held)


def test_arithmetic_rows_are_right_and_complete():
    every = arithmetic_rows()
    assert len(every) == 16200 and len({row["prompt"] for row in every}) == 16200
    assert all(str(eval(row["prompt"].rstrip("="))) == row["answer"] for row in every)
    assert len(arithmetic_rows(["-"])) == 8100


@pytest.mark.parametrize("operations", [[], ["*"], ["+", "/"]])
def test_unknown_operations_are_refused(operations):
    with pytest.raises(ValueError, match=r"operations must be some of '\+' and '-'"):
        arithmetic_rows(operations)
