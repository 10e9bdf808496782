"""The files in ``/dev/shm`` by which the ranks of an engine on a CPU add up: they lose their names once all have them.

vLLM 0.32 makes one of 4 MiB for each rank, and leaves them there when its ranks are ended, by whatever. A file without
a name lives as long as a process has it in its memory: nothing is left of ranks that were closed or killed.

The file stands alone since each fault of vLLM that the plugin mends has one, to be removed with that fault.
"""

# pyright: reportMissingImports=false

import functools
import glob
from pathlib import Path
from typing import Any

PLACE = Path("/dev/shm")


def install() -> None:
    """Take the names away in every group of ranks that this process joins from now on; again has no effect."""
    from vllm.distributed.device_communicators import cpu_communicator

    group = cpu_communicator._CPUSHMDistributed
    join = group._init_cpu_shm
    if hasattr(join, "of_rl_fn"):
        return

    @functools.wraps(join)
    def join_and_unlink(self: Any) -> int:
        try:
            return join(self)  # ends with a barrier: every rank has every file then
        finally:
            unlink(self.group_name)

    join_and_unlink.of_rl_fn = True  # type: ignore[attr-defined]
    group._init_cpu_shm = join_and_unlink


def unlink(group: str, place: Path = PLACE) -> None:
    """Remove the files of a group of ranks; each of its ranks may."""
    for file in place.glob(f"*{glob.escape(group)}*"):
        file.unlink(missing_ok=True)
