"""Where a thread is, for the message of a deadline."""

import sys
import traceback


def where(thread: int | None, frames: int = 12) -> str:
    """The innermost frames of the thread with that identity, the last one first."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return "no thread"
    stack = traceback.extract_stack(frame)[-frames:]
    return "\n".join(f"    {entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(stack))
