"""Ranks in which a sync fills complete copies: from sharded, tensor-parallel and whole sources, by each transport."""

import traceback
from pathlib import Path
from types import SimpleNamespace

import torch

from rl_bridge.rollout.vllm.weight_copies import VLLMReceiver
from rl_bridge.weights import EngineRef, sync_weights
from tests.support.weight_engines import engine, joined, model

COMBINATIONS = [
    ("same_slot", ("shard", (0, 1)), (0, 1)),
    ("same_slot", ("tensor", (0, 1)), (1,)),
    ("same_slot", ("copies", (0, 1)), (0, 1)),
    ("shared_memory", ("shard", (0, 1)), (1,)),
    ("shared_memory", ("tensor", (0, 1)), (0, 1)),
    ("broadcast", ("shard", (0, 1)), (1,)),
    ("broadcast", ("copies", (0,)), (0, 1)),
    ("file", ("tensor", (0, 1)), (0, 1)),
]


class Target:
    """What an engine's worker is to a sync."""

    def __init__(self, receiver):
        self._receiver = receiver

    def weight_receiver(self):
        return self._receiver


def run(rank, address, queue):
    """Puts the combinations whose copies are not the source's weights."""
    host, executor = joined(rank, address, 2)
    folder = Path(address.removeprefix("file://")).parent
    checkpoint, wrong = folder / "checkpoint", []
    wanted = dict(model(1).named_parameters())
    for transport, source, slots in COMBINATIONS:
        try:
            sender = engine(host, "policy", *source, seed=1)
            receiver = VLLMReceiver(checkpoint, copies=folder / "copies")
            if rank in slots:
                host.workers["rollout"] = SimpleNamespace(module=Target(receiver))
            target, files = EngineRef("rollout", slots), folder / "files" if transport == "file" else None
            sync_weights(
                executor, sender, target, version=7, transport=transport, bucket_bytes=4096, folder=files, timeout=30
            )
            if rank in slots:
                held = receiver.arrived(7).tensors
                equal = held.keys() == wanted.keys() and all(torch.equal(held[n], wanted[n]) for n in wanted)
                wrong += [] if equal else [(transport, source, slots)]
            receiver.copies.close()
        except Exception:
            wrong.append((transport, source, slots, traceback.format_exc()))
            break
    queue.put((rank, wrong))
