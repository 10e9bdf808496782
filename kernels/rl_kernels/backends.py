"""Which backend of an operation runs. An explicit request is honoured or refused, never replaced."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# Best first. "reference" answers any question slowly and is never chosen.
BACKENDS = {
    "logits_logprobs": ("triton", "torch", "reference"),
    # What multiplies by itself, Triton's forward and Gluon's, is there for those who ask until a GPU has shown it
    # faster than the vendor's product, which hybrid and torch take; hybrid reads a logit once, torch ten times.
    "linear_logprobs": ("hybrid", "torch", "triton", "reference", "gluon", "liger"),
    # Fused; what is not fused is linear_logprobs.
    "linear_policy_loss": ("triton", "torch", "reference"),
    # Triton reads a logit once where torch moves a hundred bytes and more for each: as much time as the product takes
    # that made the logits.
    "topk_logprobs": ("triton", "torch", "reference"),
    "sampling": ("triton", "torch", "reference", "flashinfer", "aiter"),
    "quantize": ("triton", "torch", "reference"),
    # As with linear_logprobs: PyTorch's product is the vendor's.
    "int8_matmul": ("torch", "triton", "reference"),
}

# Other libraries' kernels: the module to import, and the release whose signatures the adapter was written against. They
# lack what the operation's own backends have, refuse it by name, and are never chosen.
OUTSIDE = {
    "liger": ("liger_kernel", "liger-kernel 0.8.5"),
    "flashinfer": ("flashinfer", "flashinfer-python 0.7.2.post1"),
    "aiter": ("aiter", "amd-aiter 0.1.7.post2.dev18"),
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
    if backend in ("triton", "hybrid"):
        if find_spec("triton") is None:
            return "triton is not installed"
        if device != "cuda" and not interpreting():
            return "Triton compiles for GPUs (on a CPU its interpreter runs with TRITON_INTERPRET=1, for tests)"
    if backend == "gluon":
        if find_spec("triton") is None:
            return "triton is not installed"
        # Before Triton is asked, which would import it where it is of no use.
        if device != "cuda" or not _has_gluon_kernel():
            return "gluon has kernels for GPUs of compute capability 9.0 and 10.0 and for gfx950 only"
        if find_spec("triton.experimental.gluon") is None:
            return "this Triton has no Gluon (3.6 and 3.9 have)"
    if backend == "reference" and find_spec("jax") is None:
        return "jax is not installed"
    if backend in OUTSIDE:
        module, written_against = OUTSIDE[backend]
        if find_spec(module) is None:
            return f"{backend} is not installed (its adapter was written against {written_against})"
        if device != "cuda":
            return f"{backend} has kernels for GPUs only"
        if (backend == "aiter") != _rocm():
            return f"{backend} has kernels for {'AMD' if backend == 'aiter' else 'NVIDIA'} GPUs only"
    return None


def _rocm() -> bool:
    import torch

    return torch.version.hip is not None


def _has_gluon_kernel() -> bool:
    import torch

    if _rocm():
        return torch.cuda.get_device_properties().gcnArchName.split(":")[0] == "gfx950"
    return torch.cuda.get_device_capability() in ((9, 0), (10, 0))


def why_not(backend: str, device: str) -> str:
    """Why a backend was not chosen: it cannot run, or nobody asked for it."""
    against = f" (its adapter was written against {OUTSIDE[backend][1]})" if backend in OUTSIDE else ""
    return refusal(backend, device) or f"only when asked for by name{against}"


def suits(backend: str, device: str) -> bool:
    """Whether a backend that can run is one to choose: an interpreter is not, nor what no GPU has timed, nor another
    library's kernel.
    """
    return backend not in OUTSIDE and backend != "gluon" and (backend not in ("triton", "hybrid") or device == "cuda")


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which is decided when a kernel's file is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def implementation(operation: str, device: str, backend: str | None) -> ModuleType:
    """The module of the backend that `select` names; a backend's name is its file's."""
    return import_module(f"rl_kernels.{operation}.{select(operation, device, backend)}")
