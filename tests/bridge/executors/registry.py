"""The scenarios there are, and what they are written with."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SCENARIOS: dict[str, Callable[[Any], None]] = {}
IN_OTHER_PROCESSES: set[str] = set()
"""Scenarios about what only an executor with processes of its own can do."""


def scenario(check):
    SCENARIOS[check.__name__] = check
    return check


def remote(check):
    IN_OTHER_PROCESSES.add(check.__name__)
    return scenario(check)


def scenarios(executor) -> list[str]:
    """Names of those that hold for this executor."""
    return [name for name in SCENARIOS if executor.name != "local" or name not in IN_OTHER_PROCESSES]


def outcomes(executor) -> dict[str, str | None]:
    """What went wrong in each scenario, None where nothing did."""
    found: dict[str, str | None] = {}
    for name in scenarios(executor):
        try:
            SCENARIOS[name](executor)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def every(executor, *args) -> dict[int, tuple]:
    return {slot.index: args for slot in executor.slots}


def last(executor) -> int:
    return len(executor.slots) - 1


def raised(run) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def total(host, slots, value):
    tensor = torch.full((2,), value)
    group = host.group(slots)
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor[0].item()
