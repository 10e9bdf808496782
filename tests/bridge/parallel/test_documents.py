"""Documents of a batch: packed and back, and through a model, where they do not see each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.data.token_batch import shared_prefixes
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.parallel.documents import Documents
from tests.support.attending_models import FAMILIES, batch, grouped_batch, tiny, transformers_checkpointing

LENGTHS = [7, 0, 1, 12, 7, 3]
BATCHES = st.lists(st.integers(0, 6), max_size=6)


@st.composite
def batches(draw):
    """Lengths, some of the rows in any order, and columns enough."""
    lengths = draw(BATCHES)
    rows = draw(st.lists(st.sampled_from(range(len(lengths))), unique=True)) if lengths else []
    return lengths, rows, draw(st.integers(max([1, *lengths]), 8))


def arranged(lengths, rows, columns, rest=()):
    values = torch.arange(1.0, 1 + len(lengths) * columns * (2 if rest else 1), dtype=torch.float64)
    return values.reshape(len(lengths), columns, *rest)


@given(made=batches(), rest=st.sampled_from([(), (2,)]))
def test_documents_are_packed_shortest_first_and_come_back(made, rest):
    lengths, rows, columns = made
    values = arranged(lengths, rows, columns, rest)
    documents = Documents(lengths, rows=rows)
    packed = documents.take(values)
    order = [row for row in sorted(rows, key=lambda row: lengths[row]) if lengths[row]]
    wanted = [values[row, : lengths[row]] for row in order]
    assert torch.equal(packed[0], torch.cat(wanted) if wanted else torch.zeros(1, *rest, dtype=values.dtype))
    back = documents.put(packed, values.shape[:2])
    kept = torch.zeros_like(values)
    for row in rows:
        kept[row, : lengths[row]] = values[row, : lengths[row]]
    assert torch.equal(back, kept)
    positions = documents.forward_kwargs["position_ids"][0].tolist()
    assert positions == ([i for row in order for i in range(lengths[row])] or [0])


@given(made=batches())
def test_gradients_go_the_same_ways(made):
    lengths, rows, columns = made
    values = arranged(lengths, rows, columns).requires_grad_()
    documents = Documents(lengths, rows=rows)
    packed = documents.take(values)
    weights = torch.arange(2.0, 2 + packed.numel(), dtype=torch.float64).reshape(packed.shape)
    assert torch.equal(torch.autograd.grad((packed * weights).sum(), values)[0], documents.put(weights, values.shape))
    packed = packed.detach().requires_grad_()
    back = documents.put(packed, values.shape)
    factors = arranged(lengths, rows, columns)
    assert torch.equal(torch.autograd.grad((back * factors).sum(), packed)[0], documents.take(factors))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_values_of_any_type(dtype):
    values = torch.ones(2, 3, dtype=dtype)
    documents = Documents(torch.tensor([2, 3]))
    packed = documents.take(values)
    assert packed.dtype == dtype and packed.shape == (1, 5)
    assert torch.equal(
        documents.put(packed, (2, 4)).int(), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.int32)
    )


def outputs(model, ids, mask, packed, **options):
    """Logits of the batch, zero in its padding, and gradients of a loss of them all."""
    if packed:
        documents = Documents(mask.sum(1), **options)
        logits = documents.put(model(documents.take(ids), **documents.forward_kwargs).logits, ids.shape)
    else:
        logits = model(ids, use_cache=False).logits.masked_fill(~mask[..., None], 0.0)
    model.zero_grad()
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(got, want, tolerance=1e-5):
    """Float32 sums in another order differ by 1e-6 here and by 3.1e-6 on other processors."""
    assert (got[0] - want[0]).abs().max() < tolerance * want[0].abs().max()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).abs().max() < tolerance * gradient.abs().max(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_padded_are_the_same_numbers(name, dtype, tolerance):
    model = tiny(name).to(dtype)
    ids, mask = batch(LENGTHS)
    want = outputs(tiny(name, "sdpa").to(dtype), ids, mask, False)
    assert_close(outputs(model, ids, mask, False), want, tolerance)
    assert_close(outputs(model, ids, mask, True), want, tolerance)
    transformers_checkpointing(model)
    assert_close(outputs(model.train(), ids, mask, True), want, tolerance)


@st.composite
def grouped(draw):
    """Rows of a few groups, which begin alike, and some of the rows."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    groups = [draw(st.integers(0, 2)) for _ in lengths]
    rows = draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    return *grouped_batch(lengths, groups, draw(st.integers(0, 3))), torch.tensor(groups), rows


def in_common(ids, lengths, rows):
    """Tokens that some rows begin with, less one; the definition."""
    alike = [len({tuple(ids[row, :t].tolist()) for row in rows}) == 1 for t in range(int(lengths[rows].min()) + 1)]
    return max(0, sum(alike) - 2) if len(rows) > 1 else 0


@given(made=grouped())
def test_shared_prefixes_are_what_a_group_has_in_common_less_a_token(made):
    ids, mask, groups, _ = made
    lengths = mask.sum(1)
    found = shared_prefixes(ids, lengths, groups)
    for row, group in enumerate(groups.tolist()):
        assert found[row] == in_common(ids, lengths, (groups == group).nonzero()[:, 0].tolist())


@given(made=grouped())
def test_a_shared_prefix_is_packed_once_and_comes_back_to_all_of_its_rows(made):
    ids, mask, groups, rows = made
    lengths = mask.sum(1)
    shared = shared_prefixes(ids, lengths, groups)
    documents = Documents(lengths, rows=rows, groups=groups, shared=shared)
    kept = torch.zeros_like(mask)
    kept[rows] = mask[rows]
    packed = documents.take(ids)
    assert torch.equal(documents.put(packed, ids.shape), ids.where(kept, 0))
    used = [row for row in rows if lengths[row]]
    saved = 0
    for group in set(groups[used].tolist()):
        members = groups[used] == group
        saved += (int(members.sum()) - 1) * int(shared[used][members][0])
    assert documents.tokens == max(1, int(lengths[used].sum() - saved))
    # Backward, a token has the gradients of all of its rows.
    values = packed.double().requires_grad_()
    weights = torch.arange(1.0, 1 + ids.numel(), dtype=torch.float64).reshape(ids.shape)
    gradient = torch.autograd.grad((documents.put(values, ids.shape) * weights).sum(), values)[0]
    assert gradient.sum() == weights[kept].sum()


GROUPS = [1, 1, 2, 1, 3, 3]


def test_a_shared_prefix_changes_no_number():
    ids, mask = grouped_batch([7, 9, 1, 12, 7, 9], GROUPS)
    groups = torch.tensor(GROUPS)
    shared = shared_prefixes(ids, mask.sum(1), groups)
    assert shared.tolist() == [4, 4, 0, 4, 4, 4]
    want = outputs(tiny(attention="sdpa"), ids, mask, False)
    assert_close(outputs(tiny(), ids, mask, True, groups=groups, shared=shared), want)


def test_rows_that_share_a_prefix_do_not_see_each_others_rest():
    ids, mask = grouped_batch([7, 9, 1, 12, 7, 9], GROUPS)
    groups = torch.tensor(GROUPS)
    shared = shared_prefixes(ids, mask.sum(1), groups)
    other = ids.clone()
    other[3, 4:] = (other[3, 4:] + 1) % 61
    options = {"groups": groups, "shared": shared}
    before, after = (outputs(tiny(), x, mask, True, **options)[0] for x in (ids, other))
    others = torch.arange(6) != 3
    assert torch.equal(before[others], after[others])
    assert torch.equal(before[3, :4], after[3, :4])
    assert (before[3] - after[3]).abs().max() > 0.1


def test_micro_batches_add_up():
    model = tiny()
    ids, mask = batch(LENGTHS)
    want = outputs(model, ids, mask, True)
    parts = [outputs(model, ids, mask, True, rows=rows) for rows in ([4, 2], [], [0, 1, 3, 5])]
    summed = {name: sum(part[1][name] for part in parts) for name in want[1]}
    assert_close((sum(part[0] for part in parts), summed), want)


def test_rows_without_tokens_run_the_model_and_give_gradients_of_zero():
    logits, gradients = outputs(tiny(), *batch([0, 0], columns=4), True)
    assert torch.equal(logits, torch.zeros(2, 4, 61))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("packed", [False, True])
def test_a_changed_document_changes_no_bit_of_the_others(packed):
    model = tiny()
    ids, mask = batch(LENGTHS)
    other = ids.clone()
    other[3] = (other[3] + 1) % 61
    before, after = (outputs(model, x.where(mask, 0), mask, packed)[0] for x in (ids, other))
    changed = torch.tensor([row == 3 for row in range(len(LENGTHS))])
    assert torch.equal(before[~changed], after[~changed])
    assert (before[changed] - after[changed]).abs().max() > 0.1


def test_documents_that_see_each_other_are_noticed():
    # What the test above would miss if it could not fail: one document of all tokens, at the documents' positions.
    model = tiny()
    ids, mask = batch(LENGTHS)
    want = outputs(model, ids, mask, True)[0]
    documents = Documents(mask.sum(1))
    one = Documents([documents.tokens]).forward_kwargs | {"position_ids": documents.forward_kwargs["position_ids"]}
    logits = model(documents.take(ids), **one).logits
    documents.plan.uses = 1
    assert (documents.put(logits, ids.shape) - want).abs().max() > 0.1


def test_a_model_that_ignores_the_plan_is_refused():
    model = tiny(attention="sdpa")
    ids, mask = batch(LENGTHS)
    with pytest.raises(ValueError, match="use_rl_fn_attention"):
        outputs(model, ids, mask, True)
    use_rl_fn_attention(model)
    assert_close(outputs(model, ids, mask, True), outputs(model, ids, mask, False))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Documents([2, -1]), "must not be negative, got -1"),
        (lambda: Documents([2, 1], rows=[0, 2]), r"from 0 to 1, got \[0, 2\]"),
        (lambda: Documents([2, 1], rows=[1, 1]), r"got \[1, 1\]"),
        (
            lambda: Documents([2, 3], groups=torch.tensor([0, 0]), shared=torch.tensor([1, 4])),
            r"got shared \[1, 4\] and lengths \[2, 3\]",
        ),
        (lambda: Documents([2, 3]).take(torch.zeros(2, 2)), r"2 rows of at least 3 tokens, got \(2, 2\)"),
        (lambda: Documents([2, 3]).take(torch.zeros(3, 3)), r"2 rows of at least 3 tokens, got \(3, 3\)"),
        (lambda: Documents([2, 3]).put(torch.zeros(1, 5), (2, 2)), r"at least 3 tokens, got \(2, 2\)"),
        (lambda: Documents([2, 3]).put(torch.zeros(1, 4), (2, 3)), r"values \[1, 5, …\], got \(1, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
