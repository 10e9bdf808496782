"""Two engines of one slot in this process, and syncs between them."""

from types import SimpleNamespace

import torch

from rl_bridge.weights import EngineRef, receiver_of, sync_weights

POLICY, ROLLOUT = EngineRef("policy", (0,)), EngineRef("rollout", (0,))
TRANSPORTS = ["same_slot", "shared_memory", "file"]
NAME = "model.layers.1.mlp.down_proj.weight"


def put(executor, name, module):
    executor._host.workers[name] = SimpleNamespace(module=module)
    return module


def module_of(executor, name):
    return executor._host.workers[name].module


def sync(executor, tmp_path, transport="same_slot", **options):
    """A sync in several buckets."""
    folder = tmp_path if transport == "file" else None
    options = {"version": 1, "bucket_bytes": 4096, "timeout": 5, "folder": folder} | options
    return sync_weights(executor, POLICY, ROLLOUT, transport=transport, **options)


def same(executor):
    pairs = zip(module_of(executor, "policy").parameters(), module_of(executor, "rollout").parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def version(executor):
    return receiver_of(module_of(executor, "rollout")).version
