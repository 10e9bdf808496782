"""The backends that tests run, and where: all that are registered and can run here. To register one is to test it."""

import pytest
import torch

from rl_kernels.backends import BACKENDS, interpreting, runnable

# Triton's interpreter reads the CPU's memory. On a machine with a GPU it runs with TRITON_INTERPRET=1 only.
DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
# What imitates a GPU on a CPU: an emulator, a patched GEMM, a count of the interpreter's launches.
imitates_a_gpu = pytest.mark.skipif(DEVICE != "cpu", reason="imitates a GPU on a CPU: run with TRITON_INTERPRET=1")


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


def unasked(operation: str, device: str = DEVICE) -> str:
    """The backend that is taken here when none is asked for, by docs/kernels.md."""
    return "triton" if device == "cuda" and operation != "int8_matmul" else "torch"


def asked_and_runs(operation: str):
    """Parametrise over ``asked`` and ``runs``: each backend by name, and None with what it takes here."""
    pairs = [(name, name) for name in backends(operation)]
    return pytest.mark.parametrize(("asked", "runs"), [*pairs, (None, unasked(operation))])
