"""JSON over HTTP with a limit to everything: tries, seconds, requests at once. Rewards and engines use it."""

import base64
import http.client
import json
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Any, Self, TypeVar

from rl_bridge.common.scrubbing import scrubbed_text

Result = TypeVar("Result")
AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)
"""Statuses that a later try may not get."""


class NoReply(Exception):
    """A server that gave no usable reply within the limits."""

    def __init__(self, text: str, status: int | None = None) -> None:
        """``status``: the last one that came, if any did."""
        super().__init__(text)
        self.status = status


class Askers:
    """Calls in threads of their own, so many at a time and in the order in which they came. A context manager.

    The end waits for no call: neither that of the block, which cancels the calls that have not begun, nor that of the
    process. ``ThreadPoolExecutor`` waits at both, for as long as a server hangs.
    """

    def __init__(self, at_once: int, name: str) -> None:
        """``at_once``: calls at a time, at least 1. ``name``: of the threads."""
        if at_once < 1:
            raise ValueError(f"{name}s at a time must be at least 1, got {at_once}")
        self._at_once, self._name, self._threads, self._closed = at_once, name, 0, False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """The future result of the call; ``cancel`` works until the call begins."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"no {self._name} after the end")
            self._calls.put((future, call))
            if self._threads < self._at_once:
                self._threads += 1
                threading.Thread(target=self._work, daemon=True, name=self._name).start()
        return future

    def close(self) -> None:
        """Cancel calls that have not begun, and let each thread end with its call."""
        with self._lock:
            self._closed = True
            try:
                while (waiting := self._calls.get_nowait()) is not None:
                    waiting[0].cancel()
            except queue.Empty:
                pass
            self._calls.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
            del entry, future, call  # not kept while the thread waits
        self._calls.put(None)  # for the next thread


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where requests go, and for how long they are tried.

    A try that fails may have been worked on; its reply, if there ever is one, is read by nobody. So a request gets one
    reply, and only a request that may be carried out twice is to be tried again: ``retries`` 0 for all others.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 60.0
    """Seconds of one try, until the last byte."""
    retries: int = 5
    """Tries after the first."""
    wait: float = 0.5
    """Seconds before the second try; doubled with each. A server's own Retry-After counts instead."""
    longest_wait: float = 30.0
    concurrency: int = 16
    """Requests at a time."""
    largest: int | None = None
    """Bytes of a reply. A larger one is no reply, and is not asked for again. None: any number."""
    unix: str | None = None
    """Path of a socket to connect to; the url's host is then a name alone."""

    def __post_init__(self) -> None:
        """Refuse limits that limit nothing, and a url that is no address."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a server's url begins with http:// or https://, got {scrubbed_text(self.url)!r}")
        if (wrong := _wrong_with(self.url)) is not None:
            raise ValueError(f"a server's url is http://HOST:PORT/PATH; {wrong}")
        limits = {name: getattr(self, name) for name in ("timeout", "retries", "concurrency", "wait")}
        if not all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits.values()):
            raise ValueError(f"timeout, retries, concurrency and wait must be numbers, got {limits}")
        if not isinstance(self.retries, int) or not isinstance(self.concurrency, int):
            raise ValueError(f"retries and concurrency must be whole numbers, got {limits}")
        if not 0 < self.timeout < float("inf") or self.retries < 0 or self.concurrency < 1 or not self.wait >= 0:
            raise ValueError(f"timeout must be > 0, retries ≥ 0, concurrency ≥ 1 and wait ≥ 0, got {limits}")

    def post(
        self,
        payload: Any,
        stop: threading.Event | None = None,
        *,
        path: str = "",
        what: str = "",
        may_be_empty: bool = False,
    ) -> Any:
        """The server's reply, as JSON. Once ``stop`` is set there is no further try.

        Args:
            payload: the request, as JSON; None is no body.
            stop: tells that nobody waits any more.
            path: behind the url.
            what: the request's name in messages.
            may_be_empty: a reply without a body is None, not a failure.

        Raises:
            NoReply: with the last failure. A request that a status calls wrong is not tried again.
        """
        # A server that does not read a body may have closed the connection before the body is sent.
        body = b"" if payload is None else json.dumps(payload).encode()
        return self._tried(path, body, stop, what, may_be_empty)

    def get(self, path: str = "") -> Any:
        """The server's reply to a request without a payload, as JSON; an empty one is None."""
        return self._tried(path, None, None, "", True)

    def _tried(self, path: str, body: bytes | None, stop: threading.Event | None, what: str, empty: bool) -> Any:
        url = self.url + path
        safe_url = scrubbed_text(url)
        name = f"{safe_url} ({what})" if what else safe_url
        wait, last, status = self.wait, "", None
        for attempt in range(self.retries + 1):
            retry_after = None
            try:
                reply = self._once(url, body)
                return None if empty and not reply else json.loads(reply)
            except urllib.error.HTTPError as error:
                with error:
                    last, status = f"status {error.code} {error.reason}: {_start(error)}", error.code
                if error.code not in AGAIN:
                    raise NoReply(f"{name} replied with {last}", status) from error
                retry_after = _retry_after(error.headers)
            except (OSError, http.client.HTTPException) as error:  # refused, reset, too slow; cut off, or no HTTP
                reason = str(getattr(error, "reason", "") or error)
                last, status = " ".join(reason.split()) or type(error).__name__, None
            except ValueError as error:
                last = f"a reply that is not JSON: {error}"
            if attempt < self.retries:
                if (stop or threading.Event()).wait(
                    min(self.longest_wait, wait if retry_after is None else retry_after)
                ):
                    break
                wait *= 2
        tries = "1 try" if self.retries == 0 else f"{self.retries + 1} tries"
        raise NoReply(f"no usable reply from {name} in {tries}; the last: {last}", status)

    def _once(self, url: str, body: bytes | None) -> bytes:
        url, user = _without_user(url)
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", **user, **dict(self.headers)})
        deadline = time.monotonic() + self.timeout
        parts, size = [], 0
        with self._open(request) as response:
            # The timeout of a socket is that of each of its reads: a reply that trickles would never end.
            while part := response.read1(65536):
                parts.append(part)
                size += len(part)
                if self.largest is not None and size > self.largest:
                    raise NoReply(f"{url} replied with more than {self.largest} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the reply was not whole after {self.timeout:g} s")
        return b"".join(parts)

    def _open(self, request: urllib.request.Request) -> Any:
        if self.unix is None:
            return urllib.request.urlopen(request, timeout=self.timeout)
        opener = urllib.request.build_opener(_UnixHandler(self.unix), urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=self.timeout)


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """(The address without ``user:password@``, the header that has them instead)."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    credentials = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {credentials}"}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnixHandler(urllib.request.HTTPHandler):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> Any:
        connection: Any = partial(_UnixConnection, self._path)
        return self.do_open(connection, req)


def _wrong_with(url: str) -> str | None:
    """The fault of an address, or None. The address is not repeated, since it may hold a password."""
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        return "this one has white space or control characters"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"this one is malformed: {error}"
    return None if host else "this one names no host"


def _retry_after(headers: Message) -> float | None:
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:  # absent, or a date
        return None


def _start(error: urllib.error.HTTPError) -> str:
    """The beginning of an error's body, if it comes at all."""
    try:
        return repr(error.read(2000).decode(errors="replace").strip()[:200])
    except (OSError, http.client.HTTPException) as failure:
        return f"its body could not be read: {failure}"
