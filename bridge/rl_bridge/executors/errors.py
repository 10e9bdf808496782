"""What can go wrong in a worker, as the driver sees it."""


class WorkerError(RuntimeError):
    """A function raised in a slot. The message has slot, call and remote traceback; ``__cause__`` is the exception."""


class WorkerDied(RuntimeError):
    """The process of a slot is gone."""


class DeadlineExceeded(TimeoutError):
    """An answer did not come in time; the message names the slots waited for and where each of them is."""
