"""Messages over TCP between the driver and the process of a slot, and how objects become bytes.

A tensor travels as the bytes of its values: a view costs no more than what it shows, and no file descriptor or CUDA
handle is sent. CUDA tensors go through host memory and arrive on the CPU. A leaf keeps ``requires_grad``; a tensor
that has a history arrives without one. Tensors that shared memory no longer do, an object sent twice in one message
is still one. Lambdas and what the script itself defines travel by value. A DTensor does not travel: to read its
values is a collective, which the receiver would wait in alone.

Both ends prove that they know the session's key, as ``multiprocessing.connection`` does it, before anything is
unpickled. A peer whose machine is lost is noticed within 45 seconds, a peer that merely reads nothing is not one: its
machine answers. Addresses are of IPv4.
"""

import contextlib
import dataclasses
import io
import pickle
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.distributed.tensor import DTensor

from rl_bridge.executors.executor import DeadlineExceeded

# Objects as bytes between processes: pickle 5 by cloudpickle, large buffers beside the pickle and never copied.

Buffer = bytes | bytearray | memoryview

# Smaller buffers travel inside the pickle: a part of its own costs two system calls.
LARGE = 4096


def dumps(message: Any) -> list[Buffer]:
    """The pickle, then the large buffers of the message, which must stay unchanged until they are sent.

    Raises:
        TypeError: the message holds a DTensor, however deep.
    """
    buffers: list[Buffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_inside).dump(message)
    return [file.getbuffer(), *buffers]


def loads(parts: Sequence[Buffer]) -> Any:
    """The message; its large arrays use the memory of ``parts[1:]``."""
    return pickle.loads(parts[0], buffers=parts[1:])


def refuse_dtensors(message: Any) -> None:
    """Refuse what ``dumps`` refuses, in a message that is handed over as it is: looks into containers and dataclasses.

    Raises:
        TypeError: there is a DTensor.
    """
    visited: set[int] = set()
    pending: list[Any] = [message]
    while pending:
        value = pending.pop()
        if isinstance(value, DTensor):
            raise _refused(value)
        if id(value) not in visited:
            visited.add(id(value))
            pending.extend(_parts_of(value))


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name))


def _refused(tensor: DTensor) -> TypeError:
    mesh = tensor.device_mesh
    return TypeError(
        f"a DTensor of shape {list(tensor.shape)} on a mesh of {mesh.size()} ranks, {tensor.placements}, does not "
        "travel: each rank has a part of it. Return tensor.full_tensor(), in every rank because it is a collective, "
        "or this rank's part, tensor.to_local()"
    )


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise _refused(obj)
        plain = type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized
        return _reduce(obj) if plain and obj.device.type != "meta" else super().reducer_override(obj)


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().data
    return _tensor, (
        pickle.PickleBuffer(raw),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.is_leaf and tensor.requires_grad,
    )


def _tensor(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape).requires_grad_(requires_grad)


# Messages: the end of the stream is the end of the process.

Address = tuple[str, int]

_HEADER = struct.Struct("<BQI")
_PARTS_AT_ONCE = 512  # the kernel takes at most 1024 buffers in one call
_HANDSHAKE_SECONDS = 10
_HELLO = 255
_LOOK_SECONDS = 5.0  # between looks at a line that brings nothing
_LOST_SECONDS = 25.0  # of data or probes that the other machine does not acknowledge
_KEEPALIVE = {"KEEPIDLE": 10, "KEEPINTVL": 5, "KEEPCNT": 6}  # the kernel's own limit for an idle line: 40 seconds
_TCP_INFO = struct.Struct("8B13I")  # the head of Linux's struct tcp_info


class Frame(NamedTuple):
    """One message of a side: a kind, the number of the call, and the encoded content."""

    kind: int
    number: int
    parts: Sequence[Buffer]


class Channel:
    """One end of an authenticated connection. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket = connection
        self._lock = threading.Lock()
        self._doubtful_since: float | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # No TCP_USER_TIMEOUT: the kernel would end the line of a process that holds the interpreter lock and reads
        # nothing for as long, though the process' machine answers; and it would overrule keepalive.
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, f"TCP_{option}"):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        seconds, fraction = divmod(_LOOK_SECONDS, 1)
        bound = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def send(self, kind: int, number: int, parts: Sequence[Buffer] = ()) -> None:
        """Send one frame, however long the other side takes; the buffers may change afterwards."""
        views = views_of(kind, number, parts)
        with self._lock:
            while views:
                _drop(views, self._socket.sendmsg(views[:_PARTS_AT_ONCE]))

    def send_some(self, views: list[memoryview]) -> None:
        """Send as much as goes without waiting, and drop from ``views`` what has been sent. One thread at a time."""
        with contextlib.suppress(BlockingIOError):
            while views:
                _drop(views, self._socket.sendmsg(views[:_PARTS_AT_ONCE], [], socket.MSG_DONTWAIT))

    def wait_for_room(self) -> None:
        """Return when more can be sent, when the connection has ended, or after a second."""
        with contextlib.suppress(ValueError):  # the socket has been closed: sending says so
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll(1000)

    def receive(self) -> Frame:
        """The next frame.

        Raises:
            EOFError: the other side is gone.
            OSError: the connection is lost, or the other machine.
        """
        kind, number, count = _HEADER.unpack(self._receive(_HEADER.size))
        sizes = struct.unpack(f"<{count}Q", self._receive(8 * count))
        return Frame(kind, number, [self._receive(size) for size in sizes])

    def _receive(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:  # nothing for a while
                self._look()
                continue
            if not received:
                raise EOFError("connection closed")
            view = view[received:]
        return buffer

    def _look(self) -> None:
        """Whether the other machine acknowledges what is sent to it, if there is anything.

        A machine answers probes and takes data in whatever its processes do: one whose process reads nothing closes
        its window, which it acknowledges again and again.

        Raises:
            OSError: it has not done so for too long.
        """
        if not hasattr(socket, "TCP_INFO"):
            return
        info = _TCP_INFO.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        retransmits, probes, milliseconds = info[2], info[3], info[-1]
        now = time.monotonic()
        if not retransmits and probes < 2:
            self._doubtful_since = None
        elif self._doubtful_since is None:
            self._doubtful_since = now
        elif now - self._doubtful_since >= _LOST_SECONDS and milliseconds >= 1000 * _LOST_SECONDS:
            raise OSError(f"its machine has not answered for {milliseconds / 1000:.0f} s")

    @property
    def own_address(self) -> str:
        """The address of this machine as the other side reaches it."""
        return self._socket.getsockname()[0]

    def close(self) -> None:
        """End the connection; a thread that receives gets ``EOFError``."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def views_of(kind: int, number: int, parts: Sequence[Buffer]) -> list[memoryview]:
    """The bytes of a frame; no copy is made of large parts."""
    views = [memoryview(part).cast("B") for part in parts]
    header = _HEADER.pack(kind, number, len(views)) + struct.pack(f"<{len(views)}Q", *map(len, views))
    return [memoryview(header), *(view for view in views if len(view))]


def _drop(views: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes away."""
    whole = 0
    while whole < len(views) and count >= len(views[whole]):
        count -= len(views[whole])
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]


class Listener:
    """The driver's door. Each connection is let in by a thread of its own, so that a silent stranger delays nobody."""

    def __init__(self, host: str) -> None:
        """Listen at any free port of the address ``host``; "" for all addresses of this machine."""
        self.key = secrets.token_bytes(32)
        self._socket = socket.create_server((host, 0), backlog=1024)
        self._socket.settimeout(0.5)
        self._arrived: queue.SimpleQueue[tuple[int, Any, Channel]] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="rl_bridge door").start()

    @property
    def port(self) -> int:
        """Where to connect to."""
        return self._socket.getsockname()[1]

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of file descriptors, say: those there are go on
                continue
            threading.Thread(target=self._let_in, args=(connection,), daemon=True).start()

    def _let_in(self, connection: socket.socket) -> None:
        try:
            _authenticate(connection, self.key, first=True)
            channel = Channel(connection)
            hello = channel.receive()
            if hello.kind != _HELLO:
                raise AuthenticationError("no greeting")
            self._arrived.put((hello.number, loads(hello.parts), channel))
        except Exception:  # whatever a stranger sends: the handshake asserts too
            connection.close()

    def collect(
        self, slots: Collection[int], timeout: float, check: Callable[[], None] = lambda: None
    ) -> dict[int, tuple[Channel, Any]]:
        """The channel and the greeting of every slot; ``check`` is called meanwhile, and may raise.

        Raises:
            DeadlineExceeded: a slot's process did not connect in time.
        """
        channels: dict[int, tuple[Channel, Any]] = {}
        end = time.monotonic() + timeout
        try:
            while missing := sorted(set(slots) - set(channels)):
                check()
                seconds = end - time.monotonic()
                if seconds <= 0:
                    arrived = f"{len(channels)} of {len(slots)} workers connected in {timeout:g} s"
                    raise DeadlineExceeded(f"start: {arrived}; slots {missing} did not")
                with contextlib.suppress(queue.Empty):
                    slot, greeting, channel = self._arrived.get(timeout=min(seconds, 0.2))
                    channels[slot] = (channel, greeting)
        except BaseException:
            for channel, _ in channels.values():
                channel.close()
            raise
        return channels

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        self._socket.close()


def connect(addresses: Sequence[Address], key: bytes, slot: int, greeting: Any, timeout: float) -> Channel:
    """A channel to the listener that has this key, at the first of ``addresses`` where it answers.

    Raises:
        DeadlineExceeded: it answers at none of them.
    """
    end = time.monotonic() + timeout
    while True:
        trouble = []
        for address in addresses:
            try:
                connection = socket.create_connection(address, timeout=max(min(5.0, end - time.monotonic()), 0.1))
            except OSError as error:
                trouble.append(f"{address[0]}:{address[1]} {type(error).__name__}: {error}")
                continue
            try:
                _authenticate(connection, key, first=False)
            except (OSError, EOFError, AuthenticationError) as error:  # another job's port
                connection.close()
                trouble.append(f"{address[0]}:{address[1]} {type(error).__name__}: {error}")
                continue
            channel = Channel(connection)
            channel.send(_HELLO, slot, dumps(greeting))
            return channel
        if time.monotonic() > end:
            raise DeadlineExceeded(f"slot {slot} cannot reach the driver in {timeout:g} s: {'; '.join(trouble)}")
        time.sleep(0.2)


def _authenticate(connection: socket.socket, key: bytes, *, first: bool) -> None:
    """Both sides challenge each other. The kernel's timeout bounds every read."""
    connection.settimeout(None)
    bound = struct.pack("ll", _HANDSHAKE_SECONDS, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, bound)
    with Connection(connection.dup().detach()) as pipe:
        if first:
            deliver_challenge(pipe, key)
            answer_challenge(pipe, key)
        else:
            answer_challenge(pipe, key)
            deliver_challenge(pipe, key)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
