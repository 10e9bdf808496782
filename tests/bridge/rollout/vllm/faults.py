"""Fourteen faults of a weight update: what the stream, the file or the engine does wrong, on bare vLLM and here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_bridge.weights import adapters

DOWN, KEY, QUERY = (
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
)


def without(lost):
    """The stream lacks a tensor."""
    return lambda name, tensor: [] if name == lost else [(name, tensor)]


def renamed(name, tensor):
    """A layer that the engine does not have."""
    return [(name.replace("layers.1", "layers.9") if name == DOWN else name, tensor)]


def cut(name, tensor):
    """A column is missing."""
    return [(name, tensor[:, :-1].contiguous() if name == DOWN else tensor)]


def halved(name, tensor):
    """Half the bits."""
    return [(name, tensor.to(torch.float16) if name == DOWN else tensor)]


def twice(name, tensor):
    """A part of a fused tensor comes twice."""
    return [(name, tensor)] * (2 if name == QUERY else 1)


def poisoned(name, tensor):
    """One value is no number."""
    if name == DOWN and tensor.device.type != "meta":
        tensor = tensor.clone()
        tensor[0, 0] = torch.nan
    return [(name, tensor)]


def truncated(worker, monkeypatch):
    receiver = worker.updated.receiver
    arrived = receiver.arrived

    def shortened(version):
        copy = arrived(version)
        shorten(copy.folder / "model.safetensors")
        return copy

    monkeypatch.setattr(receiver, "arrived", shortened)


def shorten(path: Path, to=None):
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1000 if to is None else to)


def not_paused(worker, monkeypatch):
    monkeypatch.setattr(worker.client, "pause", lambda: None)


def not_reset(worker, monkeypatch):
    client = worker.client
    monkeypatch.setattr(client, "pause", lambda: client._core.pause_scheduler("keep", clear_cache=False))
    monkeypatch.setattr(client, "reset_prefix_cache", lambda: True)


def crashed(worker, monkeypatch):
    client = worker.client
    update = client.update

    def half(folder, names):
        update(folder, names[: len(names) // 2])
        raise ConnectionError("the connection was lost")

    monkeypatch.setattr(client, "update", half)


def wrong_scaling(worker, monkeypatch):
    """α/r where the adapter was trained with α/√r: rank 4, so the merged adapter has half its size."""
    merged = adapters.merged
    monkeypatch.setattr(adapters, "merged", lambda weight, layer: (weight + merged(weight, layer)).detach() / 2)


def not_delivered(client, monkeypatch):
    """The update's adapter has its version and is nowhere; a fresh engine gets it."""
    adopt, left = client.adopt, [1]

    def lost(folder, version):
        return client.engine.set_weight_version(version) if left and left.pop() else adopt(folder, version)

    monkeypatch.setattr(client, "adopt", lost)


def wrong_version(worker, monkeypatch):
    client = worker.client
    finish = client.finish
    monkeypatch.setattr(client, "finish", lambda version: finish("0"))


@dataclass(frozen=True)
class Fault:
    """``through``: what the stream gives instead; ``here``: what breaks in the worker; ``bare``: arguments of the same
    in a bare update; ``adapter``: of a policy with adapters; ``left``: bare vLLM leaves
    memory as it finds it, and the same fault gives another policy's samples in one run and NaN in another."""

    name: str
    through: Callable | None = None
    here: Callable | None = None
    bare: str = ""
    adapter: bool = False
    left: bool = False


TIED = "nothing is wrong; the head is tied to the embeddings (CPU)"
NOT_DELIVERED = "an adapter as such is not delivered"
"""The fourteenth: of engines that take adapters."""
FAULTS = [
    Fault("a tensor is missing", without(DOWN), left=True),
    Fault("a part of a fused tensor is missing (`k_proj`)", without(KEY), left=True),
    Fault("an unknown name", renamed),
    Fault("a wrong shape", cut),
    Fault("a wrong dtype (float16 for float32)", halved),
    Fault("a duplicate (`q_proj` twice)", twice),
    Fault("a NaN in a weight", poisoned),
    Fault("the file is truncated", here=truncated, bare="truncated"),
    Fault("no pause, a request is running", here=not_paused, bare="running"),
    Fault("no reset of the prefix cache", here=not_reset, bare="cached"),
    Fault("a crash in between", here=crashed, bare="crashed"),
    Fault("an adapter merged with α/r instead of α/√r", here=wrong_scaling, adapter=True),
    Fault("a wrong version", here=wrong_version, bare="version"),
]
