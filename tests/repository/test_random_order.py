"""The order that a seed draws: every test once, files together, the same in every process."""

from itertools import pairwise
from types import SimpleNamespace

from tests.support.ordering import in_random_order

ITEMS = [SimpleNamespace(nodeid=f"tests/test_{file}.py::test_{test}") for file in "abcd" for test in range(5)]


def ids(items):
    return [item.nodeid for item in items]


def test_a_seed_draws_an_order_of_files_and_of_their_tests():
    """CORE-14."""
    orders = [ids(in_random_order(ITEMS, seed)) for seed in range(20)]
    assert all(sorted(order) == ids(ITEMS) for order in orders) and len({*map(tuple, orders)}) == 20
    assert ids(in_random_order(ITEMS[::-1], 3)) == orders[3], "whatever order the tests were collected in"
    for order in orders:
        files = [name.split("::")[0] for name in order]
        assert sum(one != later for one, later in pairwise(files)) == 3
