"""Which tiles the forward kernel uses where: a function of the architecture, the operands and the model, never of N."""

from typing import NamedTuple

import torch
import triton


class Configuration(NamedTuple):
    """A tile's tokens (M), vocabulary (N) and slice of the hidden size (K); warps; stages of the pipeline over K."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# By architecture and bytes of an operand (4 also where hidden states and weight differ). None has run on a GPU. With
# Triton 3.9 and 3.6 none spills on sm_80, sm_90, sm_100, gfx90a, gfx942 and gfx950, with no option or with every one,
# whether or not the hidden size is a multiple of BLOCK_K. The kernel reads the bits of at most 64 tokens.
TABLE = {
    ("sm_80", 2): Configuration(128, 64, 32, 8, 3),
    ("sm_80", 4): Configuration(64, 32, 32, 4, 2),
    ("sm_80", 8): Configuration(32, 32, 16, 4, 2),
    ("sm_90", 2): Configuration(128, 64, 64, 8, 3),
    ("sm_90", 4): Configuration(64, 32, 32, 4, 2),
    ("sm_90", 8): Configuration(32, 32, 16, 4, 2),
    ("sm_100", 2): Configuration(128, 64, 64, 8, 3),
    ("sm_100", 4): Configuration(32, 64, 32, 4, 2),
    ("sm_100", 8): Configuration(32, 32, 16, 4, 2),
    ("gfx", 2): Configuration(128, 64, 32, 8, 2),
    ("gfx", 4): Configuration(64, 32, 32, 4, 2),
    ("gfx", 8): Configuration(32, 32, 16, 4, 1),
    ("cpu", 2): Configuration(16, 16, 16, 1, 1),
    ("cpu", 4): Configuration(16, 16, 16, 1, 1),
    ("cpu", 8): Configuration(16, 16, 16, 1, 1),
}
# A multiple of every BLOCK_N: no tile crosses from one part of the vocabulary into the next.
_PART = 256
_PARTS = 8


def configuration(architecture: str, width: int, hidden_size: int, vocab_size: int) -> Configuration:
    """The table's configuration, with tiles no larger than the model."""
    if architecture.startswith("gfx"):
        family = "gfx"
    elif architecture.startswith("sm_"):
        number = int(architecture[3:])
        # Consumer Blackwell, sm_12x, has Ampere's shared memory and instructions.
        family = "sm_80" if number < 90 or number >= 120 else "sm_100" if number >= 100 else "sm_90"
    else:
        family = architecture
    found = TABLE[family, width]
    if hidden_size % found.block_k:
        # Rows at any address are read an element at a time, each from a pointer of its own: a narrower tile needs
        # fewer.
        found = found._replace(block_k=min(found.block_k, 32))
    return found._replace(
        block_n=min(found.block_n, max(16, triton.next_power_of_2(vocab_size))),
        block_k=min(found.block_k, max(16, triton.next_power_of_2(hidden_size))),
    )


def part_of(vocab_size: int) -> int:
    """Size of a part of the vocabulary, whose states are merged in order: a function of the vocabulary alone."""
    return _PART * max(1, triton.cdiv(vocab_size, _PART * _PARTS))


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, …; cpu for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
