"""Weights travel as an iterator of (Hugging Face name, tensor, checksum); the receiver proves what arrived."""

from collections.abc import Iterable, Iterator

import torch

from rl_bridge.splitmix64 import GOLDEN, mix, signed

NamedWeights = Iterable[tuple[str, torch.Tensor, int]]

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Small enough for the temporaries to stay in a CPU's cache.
_CHUNK = 1 << 16


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bits, computed where the tensor lies.

    Σ mix(word + place·golden) modulo 2⁶⁴: one changed word always changes the sum, because mix is a bijection; words
    that changed places do but for a chance of 2⁻⁶⁴, because it is not linear. The same on every device.
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = next(octets.view(dtype) for size, dtype in _WORDS if octets.numel() % size == 0)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        block = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + block.numel(), device=tensor.device)
        total += mix(places.mul_(signed(GOLDEN)).add_(block)).sum()
    return int(total)


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
