"""How weights get from the source's processes to the target's."""

from rl_bridge.weights.transports.choice import TRANSPORTS, choose_transport

__all__ = ["TRANSPORTS", "choose_transport"]
