"""Weights travel as an iterator of (Hugging Face name, tensor, checksum); the receiver proves what arrived."""

from collections.abc import Iterable, Iterator

import torch

from rl_bridge.weights.bits import checksum

NamedWeights = Iterable[tuple[str, torch.Tensor, int]]


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Every parameter once (tied ones under their first name), with its checksum."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach(), checksum(parameter)


def receive_weights(model: torch.nn.Module, incoming: NamedWeights) -> None:
    """Copy incoming tensors into ``model``. All of them are checked; nothing may be unknown, missing or damaged.

    Raises:
        ValueError: a name the model does not have or that comes twice, another shape or dtype, a checksum that does
            not fit the bits received, or a parameter for which nothing came.
    """
    expected = dict(model.named_parameters())
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor, claimed in incoming:
            if name not in expected or name in seen:
                raise ValueError(f"weight {name!r} came twice" if name in seen else f"unknown weight {name!r}")
            target = expected[name]
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise ValueError(
                    f"weight {name!r}: expected {target.dtype} {tuple(target.shape)}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )
            target.copy_(tensor)
            if checksum(target) != claimed:
                raise ValueError(f"weight {name!r} was damaged on the way: its checksum is not the sender's")
            seen.add(name)
    missing = sorted(set(expected) - seen)
    if missing:
        raise ValueError(f"no weights came for {len(missing)} of {len(expected)} parameters, the first: {missing[0]!r}")
