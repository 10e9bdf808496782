"""Objects as bytes between processes: pickle 5 by cloudpickle, large buffers beside the pickle and never copied.

A tensor travels as the bytes of its values: a view costs no more than what it shows, and no file descriptor or CUDA
handle is sent. CUDA tensors go through host memory and arrive on the CPU. A leaf keeps ``requires_grad``; a tensor
that has a history arrives without one. Tensors that shared memory no longer do, an object sent twice in one message
is still one. Lambdas and what the script itself defines travel by value. A DTensor does not travel: to read its
values is a collective, which the receiver would wait in alone.
"""

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch.distributed.tensor import DTensor

Buffer = bytes | bytearray | memoryview

# Smaller buffers travel inside the pickle: a part of its own costs two system calls.
LARGE = 4096


def dumps(message: Any) -> list[Buffer]:
    """The pickle, then the large buffers of the message, which must stay unchanged until they are sent.

    Raises:
        TypeError: the message holds a DTensor, however deep.
    """
    buffers: list[Buffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_inside).dump(message)
    return [file.getbuffer(), *buffers]


def loads(parts: Sequence[Buffer]) -> Any:
    """The message; its large arrays use the memory of ``parts[1:]``."""
    return pickle.loads(parts[0], buffers=parts[1:])


def refuse_dtensors(message: Any) -> None:
    """What ``dumps`` refuses, for a message that is handed over as it is: looks into containers and dataclasses.

    Raises:
        TypeError: there is a DTensor.
    """
    seen: set[int] = set()
    left: list[Any] = [message]
    while left:
        value = left.pop()
        if isinstance(value, DTensor):
            raise _refused(value)
        if id(value) not in seen:
            seen.add(id(value))
            left.extend(_held(value))


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name))


def _refused(tensor: DTensor) -> TypeError:
    mesh = tensor.device_mesh
    return TypeError(
        f"a DTensor of shape {list(tensor.shape)} on a mesh of {mesh.size()} ranks, {tensor.placements}, does not "
        "travel: each rank has a part of it. Return tensor.full_tensor(), in every rank because it is a collective, "
        "or this rank's part, tensor.to_local()"
    )


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise _refused(obj)
        plain = type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized
        return _reduce(obj) if plain and obj.device.type != "meta" else super().reducer_override(obj)


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().data
    return _tensor, (
        pickle.PickleBuffer(raw),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.is_leaf and tensor.requires_grad,
    )


def _tensor(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape).requires_grad_(requires_grad)
