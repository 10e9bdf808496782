"""What the driver sends to a process: without waiting for a process that reads nothing."""

import threading
from collections import deque
from collections.abc import Sequence

from rl_bridge.executors.channel import Channel, views_of
from rl_bridge.executors.futures import join
from rl_bridge.executors.wire import Buffer


class Outgoing:
    """A frame on its way. Until it is settled the buffers that it was made of must not change."""

    def __init__(self, views: list[memoryview], lock: threading.Lock) -> None:
        self.size = sum(map(len, views))
        self.settled = threading.Event()
        self._views, self._lock = views, lock

    @property
    def left(self) -> int:
        """Bytes that the process' machine has not taken."""
        with self._lock:
            return sum(map(len, self._views))

    def let_go(self) -> None:
        """Copy what is left to be sent: the caller does not wait any longer, and may change the buffers."""
        with self._lock:
            self._views[:] = [memoryview(bytes(view)) for view in self._views]
        self.settled.set()


class Outbox:
    """Frames in the order of ``put``. What does not go at once is sent by a thread, which starts with the first such.

    A frame is not given up in its middle: what comes after could not be read.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        """``name`` is the thread's. Nobody else sends through the channel."""
        self._channel, self._name = channel, name
        self._frames: deque[tuple[Outgoing, list[memoryview]]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, kind: int, number: int, parts: Sequence[Buffer] = ()) -> Outgoing:
        """Send one frame, or what goes of it at once.

        Raises:
            OSError: the connection has ended.
        """
        views = views_of(kind, number, parts)
        frame = Outgoing(views, self._lock)
        with self._lock:
            if self._closed:
                raise OSError("connection closed")
            if not self._frames:
                self._channel.send_some(views)
            if not views:
                frame.settled.set()
                return frame
            self._frames.append((frame, views))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()
            self._changed.notify()
        return frame

    def stuck(self) -> Outgoing | None:
        """The frame that the process has not read to its end."""
        with self._lock:
            return self._frames[0][0] if self._frames else None

    def close(self) -> None:
        """Send nothing any more; the channel is closed before."""
        self._end()
        join(self._thread)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            left = [frame for frame, _ in self._frames]
            self._frames.clear()
            self._changed.notify()
        for frame in left:
            frame.settled.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._frames and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            self._channel.wait_for_room(1.0)
            try:
                self._send()
            except OSError:
                self._channel.close()  # the receiving thread gets the end of the stream
                self._end()
                return

    def _send(self) -> None:
        with self._lock:
            while self._frames:
                frame, views = self._frames[0]
                self._channel.send_some(views)
                if views:
                    return
                self._frames.popleft()
                frame.settled.set()
