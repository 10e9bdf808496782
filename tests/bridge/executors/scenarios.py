"""What every executor does: each scenario takes an executor and asserts. The same ones run on all kinds and sizes."""

from tests.bridge.executors import call_scenarios, step_scenarios, torch_scenarios
from tests.bridge.executors.registry import IN_OTHER_PROCESSES, SCENARIOS, every, outcomes

__all__ = [
    "IN_OTHER_PROCESSES",
    "SCENARIOS",
    "call_scenarios",
    "every",
    "outcomes",
    "step_scenarios",
    "torch_scenarios",
]
