"""What runs here: device, versions, and for each operation its backend and why the others do not."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from rl_kernels.backends import BACKENDS, select, why_not

PACKAGES = ("torch", "triton", "jax", "flashinfer-python", "liger-kernel", "amd-aiter")


class Finding(NamedTuple):
    """An operation's backends on a device: the one chosen, and why each other one is not."""

    operation: str
    backend: str
    others: dict[str, str]


class Diagnosis(NamedTuple):
    """The machine, the versions of what is installed, and one finding an operation."""

    device: str
    name: str
    versions: dict[str, str]
    findings: list[Finding]


def doctor() -> Diagnosis:
    """Look at this machine; nothing is compiled or run.

    >>> {finding.operation for finding in doctor().findings} >= {"logits_logprobs", "linear_logprobs"}
    True
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    if torch.version.hip is not None:
        name = f"{name} (ROCm {torch.version.hip})"
    findings = []
    for operation, names in BACKENDS.items():
        chosen = select(operation, device, None)
        others = {n: why_not(n, device) for n in names if n != chosen}
        findings.append(Finding(operation, chosen, others))
    return Diagnosis(device, name, {"python": platform.python_version()} | _versions(), findings)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
