"""The backends that tests run: all that are registered and can run here. To register a backend is to have it tested."""

import pytest
import torch

from rl_kernels.backends import BACKENDS, runnable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def backends(operation: str) -> list[str]:
    """The operation's registered backends that can run on this machine."""
    return runnable(operation, DEVICE)


def each_backend(*operations: str):
    """Parametrise over the operations' backends: ``backend``, and with several operations ``operation`` too."""
    for operation in operations:
        assert operation in BACKENDS, operation
    if len(operations) == 1:
        return pytest.mark.parametrize("backend", backends(operations[0]))
    pairs = [(operation, backend) for operation in operations for backend in backends(operation)]
    return pytest.mark.parametrize(("operation", "backend"), pairs)
