"""Where engines put their workers: together, apart, on given machines, and what cannot be."""

import pytest
import torch

from rl_bridge.engines import Engine, Mesh, TrainEngine
from tests.support.many_hosts import ManyHosts


class Rows:
    """A worker of any kind."""


class Doubler(torch.nn.Module):
    def double(self, x):
        return 2 * x


def test_shared_on_one_slot():
    first = TrainEngine(Doubler).build()
    assert TrainEngine(Doubler).build(colocate_with=[first]).double(2) == 4
    with pytest.raises(
        ValueError, match=r"1 slots are needed .*not_colocate_with slots .* and 0 fit; there are slot 0"
    ):
        TrainEngine(Doubler).build(not_colocate_with=[first])


def test_the_emptiest_slots_come_first():
    many = ManyHosts(3)
    engines = [Engine(Rows, executor=many, name=f"e{i}").build(mesh=Mesh(shard=n)) for i, n in enumerate([2, 1, 1])]
    assert [engine.slots for engine in engines] == [[0, 1], [2], [0]]


def test_together_and_apart():
    many = ManyHosts(4)
    policy = Engine(Rows, executor=many, name="policy").build(mesh=Mesh(shard=2))
    together = Engine(Rows, executor=many).build(mesh=Mesh(shard=2), colocate_with=[policy])
    apart = Engine(Rows, executor=many).build(mesh=Mesh(tensor=2), not_colocate_with=[policy])
    assert (policy.slots, together.slots, apart.slots) == ([0, 1], [0, 1], [2, 3])


def test_nodes():
    many = ManyHosts(4, nodes=("a", "b"))
    assert Engine(Rows, executor=many).build(mesh=Mesh(shard=2), nodes=["b"]).slots == [2, 3]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"mesh": Mesh(shard=5)}, r"5 slots are needed \(no further wish\) and 4 fit"),
        ({"nodes": ["c"]}, r"1 slots are needed \(nodes \['c'\]\) and 0 fit"),
        ({"resources": {"GPU": 1}}, r"1 slots are needed \(resources \{'GPU': 1\}\) and 0 fit"),
    ],
)
def test_a_wish_that_cannot_be_met_names_the_slots(wish, message):
    many = ManyHosts(4, nodes=("a", "b"))
    Engine(Rows, executor=many, name="held").build()
    with pytest.raises(ValueError, match=f"{message}; there are slot 0 \\(cpu on a: held\\), slot 1 .*free"):
        Engine(Rows, executor=many).build(**wish)
