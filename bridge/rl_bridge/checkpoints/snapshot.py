"""A worker's state as it was at one moment: taken apart, copied to host memory, each tensor with a checksum."""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from rl_bridge.weights import checksum
from rl_bridge.weights.source import in_charge_of

# A nested state taken apart: its tensors by name, and everything else as JSON. Nothing is pickled.


def take_apart(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(What JSON holds, name → tensor). Dictionaries, lists, tuples, tensors, numbers, strings, None may be nested.

    >>> structure, tensors = take_apart({"step": 3, "weights": {"a": torch.ones(2)}})
    >>> tensors
    {'weights/a': tensor([1., 1.])}
    >>> put_together(structure, tensors)
    {'step': 3, 'weights': {'a': tensor([1., 1.])}}

    Raises:
        TypeError: something else is in it; the message says where.
        ValueError: two tensors have the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _structure(state, "", tensors), tensors


def put_together(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``take_apart`` took apart."""
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content}
    values = [put_together(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)


def tensor_names(structure: Any) -> list[str]:
    """Names of the tensors of a state, in its order."""
    if not isinstance(structure, dict):
        return []
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return [content]
    parts = [value for _, value in content] if kind == "dict" else content
    return [name for part in parts for name in tensor_names(part)]


def _structure(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(f"two tensors of the state have the name {path!r}")
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"a checkpoint's keys are strings or integers, got {odd[0]!r} at {path or 'the top'}")
        return {"dict": [[key, _structure(item, _below(path, key), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_structure(item, _below(path, place), tensors) for place, item in enumerate(value)]}
    # Subclasses (an enum of strings, a NumPy scalar) would come back as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, None and their dictionaries, lists and tuples, "
        f"got {type(value).__name__} at {path or 'the top'}"
    )


def _below(path: str, key: str | int) -> str:
    name = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{name}" if path else name


# The snapshot: copies in host memory, each piece with a checksum of what was read.


@dataclass
class Piece:
    """The part of one tensor that this worker holds."""

    values: torch.Tensor
    """In host memory, in a buffer that is the snapshot's alone."""
    checksum: str
    """Checksum of the tensor itself, read where it lies, not of the copy."""
    parameter: bool
    """Whether the values are weights, which have to be finite."""


@dataclass
class Snapshot:
    """A worker's state. torch's distributed checkpoint planned its pieces; nothing in it changes any more."""

    structure: Any
    """Everything but the tensors, as JSON has it."""
    plan: SavePlan
    pieces: dict[MetadataIndex, Piece]


class HostBuffers:
    """Host memory that snapshots are copied to, kept from one to the next: pinned where the tensors are on CUDA."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, MetadataIndex], torch.Tensor] = {}

    def snapshot(self, name: str, module: Any) -> Snapshot:
        """Copy the state of the worker's ``module``. What an earlier snapshot of ``name`` held is overwritten.

        Raises:
            TypeError: the module has no ``checkpoint_state``, or there is something in it that no checkpoint holds.
            ValueError: a tensor is on the meta device, because its weights were freed.
        """
        structure, tensors = take_apart(state_of(name, module))
        if freed := [key for key, tensor in tensors.items() if tensor.device.type == "meta"]:
            raise ValueError(f"{name}: {freed[0]} has no values to save, its weights were freed")
        weights = _parameters(module)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors))
        plan = planner.create_local_plan()
        # A mesh that does not divide a tensor leaves workers without a row of it.
        plan = SavePlan([item for item in plan.items if _size(item) or tensors[item.index.fqn].numel() == 0])
        pieces: dict[MetadataIndex, Piece] = {}
        devices = set()
        for item in plan.items:
            values = local_values(tensors[item.index.fqn])
            devices.add(values.device)
            pieces[item.index] = Piece(
                self._copy(name, item.index, values), checksum_of(values), values.data_ptr() in weights
            )
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return Snapshot(structure, plan, pieces)

    def only(self, names: Collection[str]) -> None:
        """Let go of what other names have here, such as an earlier stage's model."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] in names}

    def _copy(self, name: str, index: MetadataIndex, values: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((name, index))
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            on_cuda = values.device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
            self._buffers[name, index] = buffer
        return buffer.copy_(values, non_blocking=True)


def state_of(name: str, module: Any) -> Mapping[str, Any]:
    """The state that a worker's module saves; a plain torch module saves its weights and optimisers."""
    owner = in_charge_of(module)
    if hasattr(owner, "checkpoint_state"):
        return owner.checkpoint_state()
    raise TypeError(f"{name}: {type(module).__name__} has no checkpoint_state()")


def give_state(module: Any, state: dict[str, Any]) -> None:
    """Give a worker's module its state back."""
    in_charge_of(module).load_checkpoint_state(state)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def checksum_of(values: torch.Tensor) -> str:
    """A checksum of a tensor's bits, computed where the tensor lies: CRC-32 on a CPU, a 64-bit sum elsewhere."""
    if values.device.type == "cpu":
        return f"crc32:{zlib.crc32(_bytes(values)):08x}"
    return f"mix64:{checksum(values)}"


def has_checksum(values: torch.Tensor, expected: str) -> bool:
    """Whether values in host memory are those that ``expected`` was computed from, on whatever device."""
    kind, _, number = expected.partition(":")
    if kind == "mix64":
        return checksum(values) == int(number)
    return zlib.crc32(_bytes(values)) == int(number, 16)


def _bytes(values: torch.Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).numpy()


def _parameters(module: Any) -> set[int]:
    if not isinstance(module, torch.nn.Module):
        return set()
    return {local_values(parameter).data_ptr() for parameter in module.parameters() if parameter.is_floating_point()}


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel()
