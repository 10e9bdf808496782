"""Weights on their way from one engine to another."""

from rl_bridge.weights.ends import WeightSyncError
from rl_bridge.weights.manifest import checksum, replace_parameters
from rl_bridge.weights.receiver import Arrival, ModuleReceiver, ReceivesWeights, WeightReceiver, receiver_of
from rl_bridge.weights.source import Cast, ModuleSource, SendsWeights, WeightSource, source_of
from rl_bridge.weights.sync import EngineRef, SyncReport, sync_weights
from rl_bridge.weights.transports import choose_transport

__all__ = [
    "Arrival",
    "Cast",
    "EngineRef",
    "ModuleReceiver",
    "ModuleSource",
    "ReceivesWeights",
    "SendsWeights",
    "SyncReport",
    "WeightReceiver",
    "WeightSource",
    "WeightSyncError",
    "checksum",
    "choose_transport",
    "receiver_of",
    "replace_parameters",
    "source_of",
    "sync_weights",
]
