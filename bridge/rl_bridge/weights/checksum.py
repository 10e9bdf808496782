"""A 64-bit checksum of a tensor's bits: what proves that a weight arrived as it was sent."""

from functools import cache

import numpy as np
import torch

from rl_bridge.common.splitmix64 import GOLDEN, MASK, mix, signed

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Small enough for the temporaries to stay in a CPU's cache; a GPU wants few launches.
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 22


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bits, computed where the tensor lies.

    Σ mix(word + place·golden) modulo 2⁶⁴: one changed word always changes the sum, because mix is a bijection; words
    that changed places do but for a chance of 2⁻⁶⁴, because mix is not linear. The same on every device.

    >>> checksum(torch.zeros(2)) == checksum(torch.tensor([0.0, -0.0]))
    False
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()  # a part of another tensor: its words would begin between two of memory
    words = next(octets.view(dtype) for size, dtype in _WORDS if octets.numel() % size == 0)
    return _on_the_cpu(words.numpy()) if words.device.type == "cpu" else _on_a_device(words)


def _on_a_device(words: torch.Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _DEVICE_CHUNK):
        block = words[start : start + _DEVICE_CHUNK].to(torch.int64)
        places = torch.arange(start, start + block.numel(), device=words.device)
        total += mix(places.mul_(signed(GOLDEN)).add_(block)).sum()
    return int(total)


@cache
def _places(count: int) -> np.ndarray:
    """(place + 1)·golden: mix begins by adding golden once more."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _on_the_cpu(words: np.ndarray) -> int:
    """The same sum. NumPy has unsigned shifts and works in place, which makes this three times as fast as torch."""
    size = min(_CHUNK, words.size)
    places = _places(_CHUNK)
    bits, shifted = np.empty(size, np.uint64), np.empty(size, np.uint64)
    total = 0
    for start in range(0, words.size, _CHUNK):
        block = words[start : start + _CHUNK].astype(np.int64, copy=False).view(np.uint64)
        b, s = bits[: block.size], shifted[: block.size]
        np.add(block, places[: block.size], out=b)
        b += np.uint64(start * GOLDEN & MASK)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(b, np.uint64(shift), out=s)
            b ^= s
            b *= np.uint64(factor)
        np.right_shift(b, np.uint64(31), out=s)
        b ^= s
        total += int(np.add.reduce(b))
    return signed(total)
