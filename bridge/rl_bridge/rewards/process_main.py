"""The process that a reward function runs in: loads it, and scores what arrives."""

import contextlib
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection

from rl_bridge.rewards.function import Asked, RewardError, load_reward


def serve(connection: Connection) -> None:
    """Until the other end is closed."""
    name, source, protocol, path = pickle.loads(connection.recv_bytes())
    sys.path[:] = path
    try:
        asked = Asked(name, load_reward(source) if isinstance(source, str) else source, protocol)
    except (ValueError, FileNotFoundError) as error:
        connection.send_bytes(pickle.dumps(("error", error)))
        return
    connection.send_bytes(pickle.dumps(("ready", asked.protocol)))
    while True:
        trajectories = pickle.loads(connection.recv_bytes())
        try:
            for values in asked.score(trajectories):
                connection.send_bytes(pickle.dumps(("values", values)))
        except RewardError as error:
            connection.send_bytes(pickle.dumps(("error", str(error))))


def end_with(parent: int) -> None:
    """End this process when its parent is gone, whatever the function is doing."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(EOFError):  # the run is over
        serve(Connection(int(sys.argv[1])))
