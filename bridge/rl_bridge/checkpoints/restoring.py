"""From a checkpoint on the disk to the state of a worker, on whatever mesh the engine is now."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from rl_bridge.checkpoints.writing import (
    DRIVER,
    INDEX,
    RANDOM,
    give_state,
    piece_name,
    put_together,
    state_of,
    take_apart,
)
from rl_bridge.engines.module import Lifecycle, room_for_states
from rl_bridge.weights.source import in_charge_of


def read_engine(path: Path, engine: str, module: Any) -> None:
    """Give a worker's ``module`` its share of an engine's state. No other worker has to take part.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    file = path / engine / INDEX
    if not file.is_file():
        saved = sorted(part.name for part in path.iterdir() if part.is_dir() and part.name not in (DRIVER, RANDOM))
        raise ValueError(f"{path} has no state of {engine!r}; it has {', '.join(saved) or 'no engine'}")
    index = json.loads(file.read_text("utf-8"))
    with _to_be_filled(module) as progress:
        with room_for_states() as places:
            _, tensors = take_apart(state_of(engine, module))
        tensors = {
            name: tensor for name, tensor in tensors.items() if name in index["tensors"] or id(tensor) not in places
        }
        _require_same_tensors(f"{path}: {engine}", index["tensors"], tensors)
        progress.begun = True
        _fill(path, index["tensors"], tensors)
        give_state(module, put_together(index["structure"], tensors))


def read_driver(path: Path) -> dict[str, Any]:
    """The driver's state."""
    tensors = path / DRIVER / "tensors.safetensors"
    structure = json.loads((path / DRIVER / "state.json").read_text("utf-8"))
    return put_together(structure, load_file(tensors) if tensors.exists() else {})


def read_random(path: Path, slot: int) -> dict[str, Any] | None:
    """The random states of a slot; None if the checkpoint was made without it."""
    file = path / RANDOM / f"slot-{slot:05d}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


@contextmanager
def _to_be_filled(module: Any) -> Iterator[SimpleNamespace]:
    """Memory for weights that were freed. What was filled in part, because an error came, may not be used."""
    progress = SimpleNamespace(begun=False)
    owner = in_charge_of(module)
    if not isinstance(owner, Lifecycle):
        yield progress
        return
    owner.make_room()
    receiver = owner.weight_receiver()
    before, receiver.version = receiver.version, receiver.version or 0
    try:
        yield progress
    except BaseException:
        receiver.version = None if progress.begun else before
        raise


@torch.no_grad()
def _fill(path: Path, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), _metadata(saved))
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(_file_of(saved, item), []).append(item)
    for name, items in by_file.items():
        with safe_open(path / name, "pt") as reader:
            for item in items:
                planner.resolve_tensor(item).detach().copy_(_read(reader, item))


def _metadata(tensors: dict[str, Any]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, tensor["dtype"])),
                torch.Size(tensor["shape"]),
                [
                    ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"]))
                    for piece in tensor["pieces"]
                ],
            )
            for name, tensor in tensors.items()
        }
    )


def _file_of(tensors: dict[str, Any], item: ReadItem) -> str:
    offsets = list(item.storage_index.offset or ())
    return next(piece["file"] for piece in tensors[item.storage_index.fqn]["pieces"] if piece["offsets"] == offsets)


def _read(reader: Any, item: ReadItem) -> torch.Tensor:
    name = piece_name(item.storage_index)
    if not item.lengths:
        return reader.get_tensor(name)
    part = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
    return reader.get_slice(name)[part]


def _require_same_tensors(what: str, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in saved:
            layout = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            before = (saved[name]["shape"], saved[name]["dtype"])
            if layout != before:
                raise ValueError(f"{what}: {name} was saved as {before}, the model has {layout}")
    if missing := _some(tensors.keys() - saved.keys()):
        raise ValueError(f"{what}: the checkpoint lacks {missing}")
    if unknown := _some(saved.keys() - tensors.keys()):
        raise ValueError(f"{what}: the model lacks {unknown}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
