"""Objects as bytes between processes: pickle 5 by cloudpickle, large buffers beside the pickle and never copied.

A tensor travels as the bytes of its values: a view costs no more than what it shows, and no file descriptor or CUDA
handle is sent. CUDA tensors go through host memory and arrive on the CPU. A leaf keeps ``requires_grad``; a tensor
that has a history arrives without one. Tensors that shared memory no longer do, an object sent twice in one message
is still one. Lambdas and what the script itself defines travel by value.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

Buffer = bytes | bytearray | memoryview

# Smaller buffers travel inside the pickle: a part of its own costs two system calls.
LARGE = 4096


def dumps(message: Any) -> list[Buffer]:
    """The pickle, then the large buffers of the message, which must stay unchanged until they are sent."""
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


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
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
