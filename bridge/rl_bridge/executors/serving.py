"""The program of a slot's process: functions one at a time in its main thread, and a thread that listens."""

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from rl_bridge.common.terminal import say
from rl_bridge.executors.calls import Step
from rl_bridge.executors.channel import Buffer, Channel, Frame, dumps, loads
from rl_bridge.executors.executor import Progress
from rl_bridge.executors.host import Host


def where(thread: int | None, frames: int = 12) -> str:
    """The innermost frames of the thread with that identity, the last one first."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return "no thread"
    stack = traceback.extract_stack(frame)[-frames:]
    return "\n".join(f"    {entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(stack))


CALL, WHERE, STOP, RESULT, ERROR = range(5)
"""Kinds of frames. The driver sends CALL, WHERE and STOP; WHERE and STOP are answered by their own kind."""

OnError = Callable[[BaseException], None]
"""A worker's act on an exception before the driver hears of it: a debugger."""


def serve(host: Host, channel: Channel, on_error: OnError | None = None) -> None:
    """Run what the driver sends until it says stop. When it hangs up the process ends, whatever it is doing."""
    calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    thread, stop, leaving = threading.get_ident(), threading.Event(), threading.Event()
    slot = host.slot

    # Holds no reference to the host: a process group that a thread lets go of while the interpreter ends aborts it.
    def listen() -> None:
        while True:
            try:
                frame = channel.receive()
            except (EOFError, OSError) as error:
                if leaving.is_set():
                    return
                # The main thread may be in a collective that nobody will join. A worker that could not stop in time
                # has not failed: what has is the driver's to say.
                if stop.is_set():
                    leave(0)
                leave(1, f"rl_bridge: slot {slot} ends: its driver is gone ({error})")
            if frame.kind == WHERE:
                channel.send(WHERE, frame.number, dumps(where(thread)))
                continue
            if frame.kind == STOP:
                stop.set()
            calls.put(frame)

    use_device(host)
    threading.Thread(target=listen, daemon=True, name="rl_bridge driver").start()
    while (frame := calls.get()).kind != STOP:
        kind, parts = answer(host, frame.parts, on_error)
        channel.send(kind, frame.number, parts)
    leaving.set()
    channel.send(STOP, frame.number)


def leave(code: int, message: str = "") -> NoReturn:
    """End the process now, without the interpreter: a thread in a collective would keep it."""
    # Whoever reads the output may be gone, or read no more.
    threading.Timer(2.0, os._exit, (code,)).start()
    try:
        if message:
            say(message, error=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def use_device(host: Host) -> None:
    """Make the slot's device the current one of this thread."""
    if host.device.type == "cuda":
        torch.cuda.set_device(host.device)


def with_step(encoded: Sequence[Buffer], step: Step | None) -> list[Buffer]:
    """The parts of a frame: (function, arguments) as bytes, and the step, which is known when the call is sent."""
    return [*encoded, b"" if step is None else pickle.dumps(step)]


def answer(host: Host, parts: Sequence[Buffer], on_error: OnError | None = None) -> tuple[int, list[Buffer]]:
    """Run an encoded call; the kind of its answer, and the answer encoded."""
    *encoded, last = parts
    step: Step | None = pickle.loads(last) if len(last) else None
    try:
        function, arguments = loads(encoded)
        result = host.run(function, arguments, step)
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        return ERROR, encode_error(error, host.progress(step, error))
    try:
        return RESULT, dumps(result)
    except Exception as error:
        unsent = TypeError(f"the result, {type(result).__name__}, cannot be sent to the driver: {error}")
        progress = host.progress(step, error, completed=True)
        return ERROR, encode_error(unsent.with_traceback(error.__traceback__), progress)


def encode_error(error: BaseException, progress: Progress | None = None) -> list[Buffer]:
    """An exception and its traceback, for ``decode_error``."""
    text = "".join(traceback.format_exception(error))
    described = f"{type(error).__name__}: {error}"
    try:
        parts = [bytes(part) for part in dumps(error)]
        loads(parts)
    except Exception:  # many exceptions cannot be made again from their arguments; their text goes without them
        parts = None
    return dumps((parts, described, text, progress))


def decode_error(parts: Sequence[Buffer]) -> tuple[BaseException, str, Progress | None]:
    """The exception, its traceback as text, and how far it came.

    One that cannot travel becomes a ``RuntimeError`` that describes it.
    """
    encoded, described, text, progress = loads(parts)
    if encoded is not None:
        try:
            return loads(encoded), text, progress
        except Exception:  # its class is not known here
            pass
    return RuntimeError(described), text, progress
