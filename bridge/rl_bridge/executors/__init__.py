"""Where the workers of engines live, and how functions are run there.

``local``: in this process. ``torchrun``: in the ranks of a torchrun job. ``ray``: in Ray actors.
"""

from rl_bridge.executors.base import Executor, Slot
from rl_bridge.executors.errors import DeadlineExceeded, OutOfStep, WorkerDied, WorkerError
from rl_bridge.executors.local import LocalExecutor

__all__ = ["DeadlineExceeded", "Executor", "LocalExecutor", "OutOfStep", "Slot", "WorkerDied", "WorkerError"]
