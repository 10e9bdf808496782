"""Which backend of an operation runs. An explicit request is honoured or refused, never replaced."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Best first. "reference" answers any question slowly and is never chosen.
BACKENDS = {
    "logits_logprobs": ("triton", "torch", "reference"),
    # Triton's forward has run in its interpreter only: it is there for those who ask until a GPU has shown it faster.
    "linear_logprobs": ("torch", "triton", "reference"),
    # Fused; what is not fused is linear_logprobs.
    "linear_policy_loss": ("triton", "torch", "reference"),
    "topk_logprobs": ("torch", "reference"),
    "sampling": ("triton", "torch", "reference"),
    "quantize": ("triton", "torch", "reference"),
    # As with linear_logprobs: PyTorch's product is the vendor's.
    "int8_matmul": ("torch", "triton", "reference"),
}


def select(operation: str, device: str, backend: str | None) -> str:
    """The backend asked for, or the best that runs on a kind of device ("cpu", "cuda", …)."""
    names = BACKENDS[operation]
    if backend is None:
        return next(name for name in names if refusal(name, device) is None and suits(name, device))
    if backend not in names:
        raise NotImplementedError(f"{operation} has no backend {backend!r}; available: {', '.join(names)}")
    reason = refusal(backend, device)
    if reason is not None:
        runnable = [name for name in names if refusal(name, device) is None]
        raise NotImplementedError(
            f"{operation}: backend {backend!r} cannot run on {device} here: {reason}; available: {', '.join(runnable)}"
        )
    return backend


@cache
def refusal(backend: str, device: str) -> str | None:
    """Why a backend cannot run on a kind of device, or None if it can."""
    if backend == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        if device != "cuda" and not interpreting():
            return "Triton compiles for GPUs (on a CPU its interpreter runs with TRITON_INTERPRET=1, for tests)"
    if backend == "reference" and find_spec("jax") is None:
        return "jax is not installed"
    return None


def suits(backend: str, device: str) -> bool:
    """Whether a backend that can run is one to choose: an interpreter is not."""
    return backend != "triton" or device == "cuda"


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which is decided when a kernel's file is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def implementation(operation: str, device: str, backend: str | None) -> ModuleType:
    """The module of the backend that `select` names; a backend's name is its file's."""
    return import_module(f"rl_kernels.{operation}.{select(operation, device, backend)}")
