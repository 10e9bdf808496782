"""Which backend of an operation runs. An explicit request is honoured or refused, never replaced."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def _in_its_folder(operation: str, *names: str) -> dict[str, str]:
    return {name: f"rl_kernels.{operation}.{name}" for name in names}


# The module of each backend, the best backend first. "reference" is the slow definition and is never chosen.
BACKENDS: dict[str, dict[str, str]] = {
    "logits_logprobs": _in_its_folder("logits_logprobs", "triton", "torch", "reference"),
    # "triton" is a GEMM of cuBLAS or hipBLASLt and one Triton pass over each block of logits.
    "linear_logprobs": _in_its_folder("linear_logprobs", "triton", "torch", "reference")
    | {
        "triton_matmul": "rl_kernels.experimental.triton_matmul.linear_logprobs",
        "gluon": "rl_kernels.experimental.gluon.linear_logprobs",
        "liger": "rl_kernels.experimental.liger",
    },
    # The fused loss runs the passes of logits_logprobs; the unfused one is linear_logprobs.
    "linear_policy_loss": _in_its_folder("logits_logprobs", "triton", "torch", "reference"),
    "topk_logprobs": _in_its_folder("topk_logprobs", "triton", "torch", "reference"),
    "sampling": _in_its_folder("sampling", "triton", "torch", "reference")
    | {"flashinfer": "rl_kernels.experimental.flashinfer", "aiter": "rl_kernels.experimental.aiter"},
    "quantize": _in_its_folder("quantize", "triton", "torch", "reference"),
    # PyTorch's int8 GEMM is that of cuBLAS or hipBLASLt.
    "int8_matmul": _in_its_folder("int8_matmul", "torch", "triton", "reference"),
}

# Other libraries' kernels: the module to import, and the release whose signatures the adapter was written against.
ADAPTERS = {
    "liger": ("liger_kernel", "liger-kernel 0.8.5"),
    "flashinfer": ("flashinfer", "flashinfer-python 0.7.2.post1"),
    "aiter": ("aiter", "amd-aiter 0.1.7.post2.dev18"),
}


def select(operation: str, device: str, backend: str | None) -> str:
    """The backend asked for, or the best that runs on a kind of device ("cpu", "cuda", …)."""
    names = BACKENDS[operation]
    if backend is None:
        return next(name for name in names if refusal(name, device) is None and may_be_chosen(operation, name, device))
    if backend not in names:
        raise NotImplementedError(f"{operation} has no backend {backend!r}; available: {', '.join(names)}")
    reason = refusal(backend, device)
    if reason is not None:
        raise NotImplementedError(
            f"{operation}: backend {backend!r} cannot run on {device} here: {reason}; "
            f"available: {', '.join(runnable(operation, device))}"
        )
    return backend


def runnable(operation: str, device: str) -> list[str]:
    """The operation's backends that can run on a kind of device, the best first."""
    return [name for name in BACKENDS[operation] if refusal(name, device) is None]


@cache
def refusal(backend: str, device: str) -> str | None:
    """Why a backend cannot run on a kind of device, or None if it can."""
    if backend in ("triton", "triton_matmul"):
        if find_spec("triton") is None:
            return "triton is not installed"
        if device != "cuda" and not interpreting():
            return "Triton compiles for GPUs (on a CPU its interpreter runs with TRITON_INTERPRET=1, for tests)"
    if backend == "gluon":
        if find_spec("triton") is None:
            return "triton is not installed"
        # Before Triton is asked, which would import Triton where there is no use for it.
        if device != "cuda" or not _has_gluon_kernel():
            return "gluon has kernels for GPUs of compute capability 9.0 and 10.0 and for gfx950 only"
        if find_spec("triton.experimental.gluon") is None:
            return "this Triton has no Gluon (3.6 and 3.9 have)"
    if backend == "reference" and find_spec("jax") is None:
        return "jax is not installed"
    if backend in ADAPTERS:
        module, written_against = ADAPTERS[backend]
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
    """Why a backend was not chosen: the backend cannot run, or nobody asked for it."""
    against = f" (its adapter was written against {ADAPTERS[backend][1]})" if backend in ADAPTERS else ""
    return refusal(backend, device) or f"only when asked for by name{against}"


def experimental(operation: str, backend: str) -> bool:
    """Whether the backend runs on request only: see ``rl_kernels.experimental``."""
    return BACKENDS[operation][backend].startswith("rl_kernels.experimental.")


def may_be_chosen(operation: str, backend: str, device: str) -> bool:
    """Whether a backend that can run may be taken unasked: Triton's interpreter may not, nor what is experimental."""
    return not experimental(operation, backend) and (backend != "triton" or device == "cuda")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which is decided when a kernel's file is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def implementation(operation: str, device: str, backend: str | None) -> ModuleType:
    """The module of the backend that `select` names."""
    return import_module(BACKENDS[operation][select(operation, device, backend)])
