"""What a mesh refuses, and the one that needs no process group."""

import pytest
import torch

from rl_bridge.executors.host import Host
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.mesh import Mesh, make_mesh, model_mesh


def test_one_slot_needs_no_mesh():
    assert make_mesh(Host(5), (5,), Mesh()) is None


@pytest.mark.parametrize(
    ("slot", "slots", "message"),
    [
        (0, (0, 1, 2), r"tensor=2.*needs 2 workers, got 3 slots"),
        (0, (1, 0), r"must ascend.*slot 0, got \[1, 0\]"),
        (0, (0, 0), r"must ascend"),
        (2, (0, 1), r"contain this process' slot 2, got \[0, 1\]"),
    ],
)
def test_slots_that_are_no_mesh_are_refused(slot, slots, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(Host(slot), slots, Mesh(tensor=2))


def test_a_mesh_of_another_make_is_refused():
    with pytest.raises(ValueError, match="was not made by make_mesh"):
        model_mesh(object())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
def test_a_dtype_that_loses_small_gradients_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}=torch\.float16 .* loses gradients .*: torch\.bfloat16"):
        ParallelConfig(**{name: torch.float16})
    assert getattr(ParallelConfig(**{name: torch.bfloat16}), name) == torch.bfloat16


def test_dtypes_without_gradients_are_refused():
    with pytest.raises(ValueError, match=r"reduce_dtype must be one of .*, got torch\.int8"):
        ParallelConfig(reduce_dtype=torch.int8)
