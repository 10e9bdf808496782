"""The memory that a step can have, and that it took, on the device where the model computes."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: of a GPU, or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def in_use(device: torch.device) -> int:
    """Bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def begin_peak(device: torch.device) -> None:
    """Forget earlier peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak(device: torch.device) -> int:
    """The most bytes of this process since ``begin_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return in_use(device)


def room(device: torch.device) -> int:
    """Bytes that this process could have: what it has, and what is free, on a CPU within its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(most) - int(used.read_text())))
    return in_use(device) + free
