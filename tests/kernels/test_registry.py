"""A registered backend cannot escape the tests: each operation's are parametrised over the registry."""

import importlib
import inspect

import pytest

from rl_kernels import backends
from tests.kernels import registry

# Where each operation's backends are compared with its definition.
TESTS = {
    "logits_logprobs": "logits_logprobs.test_backends",
    "linear_logprobs": "linear_logprobs.test_backends",
    "linear_policy_loss": "linear_policy_loss.test_operation",
    "topk_logprobs": "topk_logprobs.test_backends",
    "sampling": "sampling.test_backends",
    "quantize": "quantize.test_backends",
    "int8_matmul": "int8_matmul.test_int8_matmul",
}


def parametrised(module) -> set[str]:
    """Every backend with which a test of the module runs."""
    found = set()
    for _, function in inspect.getmembers(module, inspect.isfunction):
        for mark in getattr(function, "pytestmark", []):
            if mark.name == "parametrize" and mark.args[0] == "backend":
                found |= set(mark.args[1])
    return found


@pytest.mark.parametrize("operation", list(backends.BACKENDS))
def test_a_new_backend_is_picked_up(monkeypatch, operation):
    monkeypatch.setitem(backends.BACKENDS[operation], "dummy", "rl_kernels.dummy")
    module = importlib.import_module(f"tests.kernels.{TESTS[operation]}")
    try:
        assert "dummy" in parametrised(importlib.reload(module)) >= set(registry.backends(operation))
    finally:
        monkeypatch.undo()
        importlib.reload(module)
