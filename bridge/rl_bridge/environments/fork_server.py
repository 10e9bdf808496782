"""The process that environments are forked from: it loads their factory once, and each child is one conversation's."""

import contextlib
import os
import pickle
import signal
import socket
import sys
from inspect import isawaitable
from multiprocessing.connection import Connection
from typing import Any

from rl_bridge.common import event_loop
from rl_bridge.common.user_files import this_process_is_the_users
from rl_bridge.environments.environment import Session
from rl_bridge.environments.factories import FileFactory
from rl_bridge.environments.trial import Trial


def serve(control: socket.socket) -> None:
    """Fork a child for each socket that arrives, until the other end is closed."""
    connection = Connection(os.dup(control.fileno()))
    try:
        path, factory = pickle.loads(connection.recv_bytes())
        sys.path[:] = path
        factory = pickle.loads(factory)
        if isinstance(factory, FileFactory | Trial):
            factory.load()  # Once, not in every child.
    except Exception as error:
        connection.send_bytes(pickle.dumps(_portable(error)))
        return
    connection.send_bytes(pickle.dumps(None))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody reads how a child ended.
    while True:
        data, files, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            connection.close()
            _converse(Connection(files[0]), factory)
        os.close(files[0])


def _converse(connection: Connection, factory: Any) -> None:
    """Answer calls of one environment; at the end, kill this process and all that the environment has started."""
    # The session stays that of the guard, which ends an environment that loops when the driver is gone.
    os.setpgrp()
    this_process_is_the_users()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator reseeds itself after a fork.
    session = Session(factory)
    with contextlib.suppress(EOFError, OSError), event_loop.of_this_thread():  # The conversation is over.
        connection.send_bytes(pickle.dumps(os.getpid()))
        while True:
            method, *arguments = event_loop.received(connection)
            answer = _answer(session, method, arguments)
            sys.stdout.flush()
            connection.send_bytes(answer)
    os.killpg(0, signal.SIGKILL)


def _answer(session: Session, method: str, arguments: list[Any]) -> bytes:
    try:
        function = session.closing if method == "close" else getattr(session, method)
        value = None if function is None else function(*arguments)
        if isawaitable(value):
            value = event_loop.run(value, "environment")
        return pickle.dumps((None, value, session.tools))
    except BaseException as error:  # sys.exit() in an environment is a failure of the environment too.
        return pickle.dumps((_portable(error), None, ()))


def _portable(error: BaseException) -> BaseException:
    """The exception itself, or a RuntimeError with its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # The run is over.
        serve(socket.socket(fileno=int(sys.argv[1])))
