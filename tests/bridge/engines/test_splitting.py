"""Cutting rows and columns over workers and putting results together: laws over every layout."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import Mesh, NeedParallel
from rl_bridge.engines.dispatch import in_order, row_count, shares_of, split, take
from rl_fn.packing import zigzag_split

LAYOUTS = st.builds(
    Mesh, replicate=st.integers(1, 3), shard=st.integers(1, 3), sequence=st.integers(1, 2), tensor=st.integers(1, 2)
)


class Pair(NamedTuple):
    first: torch.Tensor
    second: list | None


class Batch(NamedTuple):
    """A batch that knows its tokens."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    def row_tokens(self):
        return self.lengths.tolist()

    def rows(self, index):
        return Batch(self.tokens[index], self.lengths[index])


class Groups(NamedTuple):
    """A batch that knows which of its rows go together, two at a time."""

    lengths: list[int]

    def row_tokens(self):
        return self.lengths

    def rows(self, index):
        return Groups([self.lengths[i] for i in index])

    def row_units(self):
        return [Together(np.arange(i, min(i + 2, len(self.lengths)))) for i in range(0, len(self.lengths), 2)]


class Together(NamedTuple):
    rows: np.ndarray
    tokens: int = 7


@given(parts=st.integers(1, 130), rows=st.integers(0, 140), grouped=st.booleans())
@example(parts=64, rows=126, grouped=True)
def test_every_row_is_in_one_share_however_few_there_are(parts, rows, grouped):
    batch = Groups([7] * rows) if grouped else Batch(torch.zeros(rows, 1), torch.full((rows,), 7))
    shares = shares_of([batch], rows, parts)
    assert len(shares) == parts and sorted(np.concatenate(shares).tolist()) == list(range(rows))
    assert all((np.diff(share) > 0).all() for share in shares)
    assert sum(map(row_count, (take(batch, share) for share in shares))) == rows


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def rows_of(kind, rows, seed=0):
    tensor = torch.arange(rows * 3).view(rows, 3)
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, rows))
    return {
        "tensor": tensor,
        "list": list(range(rows)),
        "vector": tensor[:, 0],
        "named tuple": Pair(tensor, list(range(rows))),
        "absent field": Pair(tensor, None),
        "batch": Batch(tensor, lengths),
    }[kind]


KINDS = ["tensor", "list", "vector", "named tuple", "absent field", "batch"]


@given(kind=st.sampled_from(KINDS), rows=st.integers(0, 20), layout=LAYOUTS, seed=st.integers(0, 99))
def test_rows_come_back_in_order(kind, rows, layout, seed):
    data = rows_of(kind, rows, seed)
    parts = split((NeedParallel(data),), {}, layout)
    found = [parts.arguments[rank][0][0] for rank in layout.speakers()]
    assert same(in_order(found, "rows", parts, layout, "test"), data)


@given(rows=st.integers(0, 20), layout=LAYOUTS)
def test_ranks_of_one_share_get_the_same_rows(rows, layout):
    parts = split((NeedParallel(torch.arange(rows)),), {}, layout)
    shares = {}
    for rank, ((share,), _) in enumerate(parts.arguments):
        assert torch.equal(shares.setdefault(layout.data_rank(rank), share), share)
    assert len(shares) == layout.data_parts and sum(map(len, shares.values())) == rows


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=40), parts=st.integers(2, 4))
def test_shares_are_balanced_by_tokens(lengths, parts):
    data = Batch(torch.zeros(len(lengths), 1), torch.tensor(lengths))
    shares = split((NeedParallel(data),), {}, Mesh(shard=parts)).arguments
    loads = [int(share.lengths.clamp(min=1).sum()) for (share,), _ in shares]
    # No row could be moved from the fullest to the emptiest share to make both better.
    fullest = shares[int(np.argmax(loads))][0][0]
    assert all(max(loads) - min(loads) <= max(1, n) for n in fullest.row_tokens())


def test_all_arguments_are_cut_by_the_batch_that_knows_its_tokens():
    batch = Batch(torch.arange(4)[:, None], torch.tensor([9, 1, 1, 9]))
    parts = split((NeedParallel([0, 1, 2, 3]), "all"), {"batch": NeedParallel(batch)}, Mesh(shard=2))
    for (numbers, text), named in parts.arguments:
        assert named["batch"].tokens[:, 0].tolist() == numbers and text == "all"
        assert int(named["batch"].lengths.sum()) == 10


@given(pairs=st.integers(1, 4), sequence=st.integers(1, 3), tensor=st.integers(1, 2))
def test_columns_are_cut_zigzag_and_come_back(pairs, sequence, tensor):
    layout = Mesh(sequence=sequence, tensor=tensor, shard=2)
    data = torch.arange(3 * 2 * sequence * pairs).view(3, -1)
    parts = split((NeedParallel(data, over="sequence"),), {}, layout)
    found = [share for (share,), _ in parts.arguments]
    whole = data[:2] if len(found[0]) == 2 else data[:1]
    expected = zigzag_split(whole.numpy(), sequence)
    for place in range(sequence):
        assert np.array_equal(found[place * tensor].numpy(), expected[place])
    ranks = layout.token_speakers() if sequence > 1 else layout.speakers()
    results = [found[rank] for rank in ranks]
    assert torch.equal(in_order(results, "rows", parts, layout, "test"), data)


def test_columns_that_cannot_be_cut():
    with pytest.raises(ValueError, match=r"6 columns cannot be cut over 2 sequence ranks: pad to 4·n"):
        split((NeedParallel(torch.zeros(2, 6), over="sequence"),), {}, Mesh(sequence=2))
    with pytest.raises(TypeError, match="takes tensors of at least two axes, got list"):
        split((NeedParallel([1, 2], over="sequence"),), {}, Mesh(sequence=2))


def test_what_has_no_rows_is_refused():
    for data in ("text", 3, {"a": 1}, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="NeedParallel takes a tensor, a NamedTuple of tensors or a sequence"):
            split((NeedParallel(data),), {}, Mesh(shard=2))


def test_other_numbers_of_rows_are_refused():
    with pytest.raises(ValueError, match=r"have the same number of rows, got \[2, 3\]"):
        split((NeedParallel([1, 2]), NeedParallel([1, 2, 3])), {}, Mesh(shard=2))


def test_a_result_that_lost_a_row():
    layout = Mesh(shard=2)
    parts = split((NeedParallel([1, 2, 3]),), {}, layout)
    with pytest.raises(ValueError, match="test is declared rows: 3 rows went in and 2 came out"):
        in_order([[1], [2]], "rows", parts, layout, "test")


def grouped_batch(groups, size, seed):
    """Groups of ``size`` completions of unequal lengths to prompts of unequal lengths, shuffled."""
    rng = np.random.default_rng(seed)
    rows = [
        single_turn([group + 2] * prompt, rng.integers(1000, 9999, rng.integers(5, 40)).tolist(), group=group)
        for group, prompt in enumerate(rng.integers(10, 60, groups).tolist())
        for _ in range(size)
    ]
    return collate([rows[i] for i in rng.permutation(len(rows))], 0)


@given(seed=st.integers(0, 999), ranks=st.sampled_from([2, 4]))
def test_groups_stay_whole_where_shares_balance_so(seed, ranks):
    batch = grouped_batch(32, 4, seed)
    parts = split((NeedParallel(batch),), {}, Mesh(shard=ranks))
    shares = [batch.groups[torch.from_numpy(share)] for share in parts.shares]
    assert sum(len(set(share.tolist())) for share in shares) == 32
    tokens = [sum(unit.tokens for unit in batch.rows(torch.from_numpy(share)).row_units()) for share in parts.shares]
    assert max(tokens) * ranks <= 1.02 * sum(tokens)


def test_few_groups_are_cut_for_the_balance():
    batch = grouped_batch(3, 8, 0)
    parts = split((NeedParallel(batch),), {}, Mesh(shard=2))
    tokens = [int(batch.lengths[torch.from_numpy(share)].sum()) for share in parts.shares]
    assert sorted(np.concatenate(parts.shares)) == list(range(24))
    assert max(tokens) * 2 <= 1.02 * sum(tokens)
