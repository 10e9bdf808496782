"""The search for a cutoff finds what a sort finds, in few steps, and ends whatever the logits are."""

from itertools import accumulate

import pytest
import torch

from rl_kernels.sampling import cutoff

LOGITS = {
    "float32": (5 * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)), 24),
    "bfloat16": (5 * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1)).bfloat16().float(), 16),
    "far from 0": (torch.randn(4, 20_000, generator=torch.Generator().manual_seed(2)) - 1e4, 24),
    # Every exponent of both signs: half of the steps halve 2³² keys.
    "every magnitude": (
        torch.cat([10.0 ** torch.linspace(-44, 38, 999), -(10.0 ** torch.linspace(-44, 38, 999))]).expand(2, -1),
        64,
    ),
    "nearly all impossible": (torch.full((2, 500), -torch.inf).index_fill(1, torch.tensor([3, 77, 400]), -2.0), 4),
    "one value": (torch.zeros(2, 500), 2),
}


@pytest.mark.parametrize("name", LOGITS)
def test_the_key_of_the_kth_largest(name):
    x, most = LOGITS[name]
    key = cutoff.ordered_key(x)
    top, nothing = key.amax(-1).long(), torch.full((len(x),), cutoff.EMPTY)
    ranked = key.long().sort(-1, descending=True).values
    for k in (1, 2, 50, 400, x.shape[-1] - 1):
        steps = 0

        def count(threshold):
            nonlocal steps
            steps += 1
            return (key >= threshold[:, None]).sum(-1)

        found = cutoff._largest(key, count, torch.full_like(top, k), nothing, top)
        assert torch.equal(found, ranked[:, k - 1]) and steps <= most, (k, steps)


def test_keys_have_the_order_of_the_floats_and_give_them_back():
    x = torch.cat([-(10.0 ** torch.linspace(38, -44, 999)), torch.zeros(1), 10.0 ** torch.linspace(-44, 38, 999)])
    key = cutoff.ordered_key(x)
    assert torch.equal(cutoff.key_value(key.long()), x) and (key.long().diff() >= 0).all()
    assert cutoff.ordered_key(torch.tensor([-0.0, 0.0, -torch.inf])).tolist() == [0, 0, cutoff.EMPTY]


@pytest.mark.parametrize("listed", [1, 4, 60])
def test_a_cutoff_is_the_same_among_the_listed_logits_and_by_bisection(monkeypatch, listed):
    """Rounded logits have ties at the cutoff; some rows are cut by number, some by mass, by both or not at all."""
    generator = torch.Generator().manual_seed(listed)
    x = (8 * torch.randn(60, 300, generator=generator)).round() / 4
    x[:5, 20:] = -torch.inf
    k = torch.randint(1, 120, (60,), generator=generator).masked_fill(torch.arange(60) % 3 == 0, 300)
    p = torch.rand(60, generator=generator).clamp(min=0.01).masked_fill(torch.arange(60) % 4 == 1, 1.0)
    wanted = cutoff.find(x, k, p, torch.full((60,), -torch.inf))
    assert (cutoff.allowed(x, wanted.key, wanted.last).sum(-1) > 60).any()
    monkeypatch.setattr(cutoff, "SORTED", listed)
    for got, expected in zip(cutoff.find(x, k, p, torch.full((60,), -torch.inf)), wanted, strict=True):
        assert torch.equal(got, expected)


def _rows(kind):
    """Three rows of 9,000 logits: too many of one value for float64, and more than ``largest`` groups."""
    x = torch.randn(3, 9000, generator=torch.Generator().manual_seed(5))
    x = {"flat": 0.1 * x, "peaked": 24 * x, "ties": (4 * x).round() / 2, "denormal": 1e-39 * x, "equal": 0 * x}[kind]
    x[1, :8900] = -torch.inf
    return x


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "denormal", "equal"])
@pytest.mark.parametrize("k", [3, 700, 1500, 9000])
def test_the_set_is_that_of_a_sort(kind, k):
    """ROLL-13, by any search: the k first of value falling, id rising, of these the fewest with p of the mass."""
    x = _rows(kind)
    for p in (1e-7, 0.5, 0.9, 1 - 2.0**-24, 1.0):
        rows = torch.full((3,), k), torch.full((3,), p), torch.full((3,), -torch.inf)
        found = cutoff.find(x, *rows)
        mass = cutoff.masses(x, x.amax(-1))
        for row in range(3):
            possible = int((x[row] > -torch.inf).sum())
            order = x[row].sort(descending=True, stable=True).indices[: min(k, possible)].tolist()
            if p < 1:
                each = mass[row, order].tolist()
                target = max(1, int(torch.ceil(rows[1][0].double() * sum(each))))
                order = [n for n, before in zip(order, accumulate(each, initial=0), strict=False) if before < target]
            got = cutoff.allowed(x[row : row + 1], found.key[row : row + 1], found.last[row : row + 1])[0]
            assert got.nonzero()[:, 0].tolist() == sorted(order), (p, row)
