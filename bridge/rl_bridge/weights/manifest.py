"""What one end sends and the other expects, compared before anything is overwritten."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_SHOWN = 4


class TensorSpec(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape_numel * self.dtype.itemsize

    @property
    def shape_numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Manifest:
    """Names in the order of the stream; with ``adapter`` they are a LoRA adapter's, and this is its configuration."""

    tensors: dict[str, TensorSpec]
    adapter: dict[str, Any] | None = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())


def described(pairs: Iterable[tuple[str, torch.Tensor]], end: str) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a stream; a name that comes twice raises."""
    tensors: dict[str, TensorSpec] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise ValueError(f"{end}: weight {name!r} comes twice")
        tensors[name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
    return tensors


def compare(sent: Manifest, expected: Manifest, ends: str) -> None:
    """Raise unless both manifests name the same tensors of the same shapes and dtypes, and the same adapter.

    Raises:
        ValueError: an unknown, missing or differently shaped weight, by its name.
    """
    faults = [f"unknown weight {name!r}" for name in sent.tensors if name not in expected.tensors]
    missing = [name for name in expected.tensors if name not in sent.tensors]
    if missing:
        count = f"{len(missing)} of {len(expected.tensors)} parameters"
        faults.append(f"no weights came for {count}, the first: {missing[0]!r}")
    for name, spec in sent.tensors.items():
        wanted = expected.tensors.get(name, spec)
        if wanted != spec:
            faults.append(f"weight {name!r}: expected {wanted.dtype} {wanted.shape}, got {spec.dtype} {spec.shape}")
    if sent.adapter != expected.adapter:
        faults.append(f"adapter: expected {expected.adapter}, got {sent.adapter}")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(f"{ends}: nothing was overwritten: " + "; ".join(faults[:_SHOWN]) + more)
