"""Where the workers of engines live, and how functions are run there.

``local``: in this process. ``torchrun``: in the ranks of a torchrun job. ``ray``: in Ray actors.
"""

from rl_bridge.executors.executor import DeadlineExceeded, Executor, OutOfStep, Slot, WorkerDied, WorkerError
from rl_bridge.executors.session import LocalExecutor

__all__ = ["DeadlineExceeded", "Executor", "LocalExecutor", "OutOfStep", "Slot", "WorkerDied", "WorkerError"]
