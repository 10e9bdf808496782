"""The Gluon kernels with a fault in their pipeline: the emulator finds each, and what it passes has none of them."""

import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.cases import N, ids, normal
from tests.kernels.experimental.gluon_emulator import Hazard
from tests.kernels.operations import linear_logprobs
from tests.kernels.registry import imitates_a_gpu

pytest.importorskip("triton.experimental.gluon")
from tests.kernels.experimental.emulation import emulate

pytestmark = imitates_a_gpu

NOTHING = "(lambda *a: None)("
# What is replaced by what in the source, and what the emulator says of it.
FAULTS = {
    "sm_90": {
        "a buffer refilled under a product": ("step - 1 + STAGES", "step + STAGES", "is read cannot become landing"),
        "a refill for another step": ("done + STAGES", "done + STAGES + 1", "whose last phase was not waited for"),
        "a phase that never flips": ("step // STAGES & 1", "step // STAGES & 0", "a wait for parity 0 in phase 1"),
        "no wait": ("mbarrier.wait(", NOTHING, "is landing cannot become read"),
        "logits taken too early": ("warpgroup_mma_wait(0, deps", "warpgroup_mma_wait(1, deps", "is read cannot"),
        "too few copies": ("STAGES):\n        fill(", "STAGES - 1):\n        fill(", "a phase that never completes"),
    },
    "sm_100": {
        "a buffer refilled under a product": ("mbarrier.wait(read", NOTHING + "read", "is read cannot become landing"),
        "a refill for another step": ("done + STAGES,", "done + STAGES + 1,", "is read cannot become landing"),
        "a phase that never flips": ("step // STAGES & 1", "step // STAGES & 0", "a wait for parity 0 in phase 1"),
        "no wait": ("mbarrier.wait(arrived", NOTHING + "arrived", "is landing cannot become read"),
        "too few copies": ("STAGES):\n        fill(", "STAGES - 1):\n        fill(", "a phase that never completes"),
        "no wait for sums": ("mbarrier.wait(finished", NOTHING + "finished", "sums are read while a product"),
        "sums' phase never flips": ("before // 2 & 1", "before // 2 & 0", "a wait for parity 0 in phase 1"),
        "sums said to be finished too early": ("if eighth == 7", "if eighth == 6", "sums are read while a product"),
        "sums replaced while some read": ("        barrier()\n", "", "another thread may still have to read"),
        "one tile of sums for both": ("sums.index(tile % 2)", "sums.index(0)", "another thread may still have to read"),
    },
    "gfx950": {
        "no wait": ("async_copy.wait_group(STAGES - 2)", "pass", "is landing cannot become read"),
        "a wait for fewer": ("wait_group(STAGES - 2)", "wait_group(STAGES - 1)", "is landing cannot become read"),
        "a copy too far ahead": ("step + STAGES - 1,", "step + STAGES,", "is landed cannot become landing"),
        "a copy before every wave has read": (
            "async_copy.wait_group(STAGES - 2)\n            copy(",
            "copy(",
            "is read cannot become landing",
            # The wait comes after the copy instead of before it.
            (
                "            # Relaxed",
                "            async_copy.wait_group(STAGES - 1)\n            # Relaxed",
            ),
        ),
        "too few copies": ("range(STAGES - 1):", "range(STAGES - 2):", "is landing cannot become read"),
        "copies under way at the end": ("async_copy.wait_group(0)", "pass", "ends while a copy is under way"),
        "a mask within a lane": ("hidden_size - done)", "hidden_size - done - 1)", "some of a lane's elements"),
    },
}


def broken(name, old, new, *more):
    """The kernel, its module's source being changed, as what the emulator takes."""
    kernel = importlib.import_module("rl_kernels.experimental.gluon.linear_logprobs").KERNELS[name].kernel
    module = importlib.import_module(kernel.fn.__module__)
    source: str = inspect.getsource(module)
    names: dict[str, Any] = {"__name__": "broken"}
    for before, after in ((old, new), *more):
        assert source.count(before) == 1
        source = source.replace(before, after)
    exec(re.sub(r"@gluon\.jit.*\n", "", source), names)
    made = {n: SimpleNamespace(fn=f) for n, f in names.items() if getattr(f, "__module__", "") == "broken"}
    names.update({n: wrapped for n, wrapped in made.items() if n != kernel.fn.__name__ and hasattr(module, n)})
    return made[kernel.fn.__name__]


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_the_emulator_finds_faults(monkeypatch, name, fault):
    old, new, message, *more = FAULTS[name][fault]
    emulate(monkeypatch, name, broken(name, old, new, *more))
    # Parts of three tiles, of seven steps each, the last of which is not full.
    hidden, weight = normal(N, 400, scale=0.3).bfloat16(), normal(4200, 400, scale=0.3).bfloat16()
    with pytest.raises(Hazard, match=message):
        linear_logprobs(hidden, weight, ids(N), backend="gluon")


@pytest.mark.parametrize("name", list(FAULTS))
def test_and_finds_none_where_there_are_none(monkeypatch, name):
    running = emulate(monkeypatch, name, broken(name, "STAGES, WARPS = ", "STAGES, WARPS = "))
    hidden, weight = normal(N, 400, scale=0.3).bfloat16(), normal(4200, 400, scale=0.3).bfloat16()
    linear_logprobs(hidden, weight, ids(N), backend="gluon")
    assert running.programs == 6
