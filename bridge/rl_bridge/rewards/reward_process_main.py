"""The process that a reward function runs in: loads the function, and scores the trajectories that arrive."""

import contextlib
import pickle
import sys
from multiprocessing.connection import Connection

from rl_bridge.rewards.function import Asked, RewardError, load_reward


def serve(connection: Connection) -> None:
    """Score batches until the other end is closed."""
    name, source, protocol, path = pickle.loads(connection.recv_bytes())
    sys.path[:] = path
    try:
        reward = Asked(name, load_reward(source) if isinstance(source, str) else source, protocol)
    except (ValueError, FileNotFoundError) as error:
        connection.send_bytes(pickle.dumps(("error", error)))
        return
    connection.send_bytes(pickle.dumps(("ready", reward.protocol)))
    while True:
        trajectories = pickle.loads(connection.recv_bytes())
        try:
            for values in reward.score(trajectories):
                connection.send_bytes(pickle.dumps(("values", values)))
        except RewardError as error:
            connection.send_bytes(pickle.dumps(("error", str(error))))


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # The run is over.
        serve(Connection(int(sys.argv[1])))
