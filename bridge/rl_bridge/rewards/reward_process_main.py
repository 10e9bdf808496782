"""The process that reward functions of a file run in: loads them, and scores the trajectories that arrive."""

import contextlib
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_bridge.common import event_loop
from rl_bridge.rewards.function import Asked, RewardError, load_reward


def serve(connection: Connection) -> None:
    """Load functions and score batches until the other end is closed, and close the functions then."""
    with contextlib.ExitStack() as functions, contextlib.suppress(EOFError, ConnectionError):  # The run is over.
        _serve(connection, functions)


def _serve(connection: Connection, functions: contextlib.ExitStack) -> None:
    sys.path[:] = pickle.loads(connection.recv_bytes())
    files: dict[Path, ModuleType] = {}
    rewards: dict[int, Asked] = {}
    while True:
        number, *message = event_loop.received(connection)
        if number not in rewards:
            name, source, protocol = message
            try:
                function = load_reward(source, files) if isinstance(source, str) else source
                rewards[number] = Asked(name, function, protocol)
            except (ValueError, FileNotFoundError) as error:
                send(connection, "error", error)
                return
            functions.callback(rewards[number].close)
            send(connection, "ready", rewards[number].protocol)
            continue
        try:
            for values in rewards[number].score(message[0]):
                send(connection, "values", values)
        except RewardError as error:
            send(connection, "error", str(error))


def send(connection: Connection, kind: str, value: Any = None) -> None:
    """Send a message to the process that reads the rewards."""
    connection.send_bytes(pickle.dumps((kind, value)))


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    connection = Connection(int(sys.argv[1]))

    def progress() -> None:
        with contextlib.suppress(OSError):  # ``serve`` finds out that the other end is closed.
            send(connection, "progress")

    with event_loop.of_this_thread(progress):
        serve(connection)


if __name__ == "__main__":
    main()
