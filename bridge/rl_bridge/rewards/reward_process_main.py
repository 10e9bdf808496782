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
    """Load functions and score batches until the other end is closed."""
    sys.path[:] = pickle.loads(connection.recv_bytes())
    files: dict[Path, ModuleType] = {}
    rewards: dict[int, Asked] = {}

    def send(kind: str, value: Any) -> None:
        connection.send_bytes(pickle.dumps((kind, value)))

    while True:
        number, *message = event_loop.received(connection)
        if number not in rewards:
            name, source, protocol = message
            try:
                function = load_reward(source, files) if isinstance(source, str) else source
                rewards[number] = Asked(name, function, protocol)
            except (ValueError, FileNotFoundError) as error:
                send("error", error)
                return
            send("ready", rewards[number].protocol)
            continue
        try:
            for values in rewards[number].score(message[0]):
                send("values", values)
        except RewardError as error:
            send("error", str(error))


if __name__ == "__main__":
    with contextlib.suppress(EOFError), event_loop.of_this_thread():  # The run is over.
        serve(Connection(int(sys.argv[1])))
