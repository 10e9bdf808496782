"""Which tiles the forward kernel uses where: a function of the architecture, the operands and the model, never of N."""

from typing import NamedTuple

import torch
import triton


class Configuration(NamedTuple):
    """Rows, entries and features of a tile; warps; stages of the pipeline over the features."""

    rows: int
    entries: int
    features: int
    warps: int
    stages: int


# By architecture and bytes of an operand. None was timed: no GPU was at hand. Compiled with Triton 3.9, the forward has
# no spills on sm_90 and sm_100, nor on sm_80 but with every option at once (385 there); on gfx90a, gfx942 and gfx950 it
# spills (5 … 10 plain in bfloat16, 40 … 75 in float32, 88 … 97 with every option). Float64 was not compiled.
TABLE = {
    ("sm_80", 2): Configuration(128, 64, 32, 8, 3),
    ("sm_80", 4): Configuration(32, 64, 32, 4, 2),
    ("sm_80", 8): Configuration(32, 32, 16, 4, 2),
    ("sm_90", 2): Configuration(128, 64, 64, 8, 3),
    ("sm_90", 4): Configuration(32, 64, 32, 4, 2),
    ("sm_90", 8): Configuration(32, 32, 16, 4, 2),
    ("gfx", 2): Configuration(128, 64, 32, 8, 2),
    ("gfx", 4): Configuration(32, 64, 32, 4, 2),
    ("gfx", 8): Configuration(32, 32, 16, 4, 2),
    ("cpu", 2): Configuration(16, 16, 16, 1, 1),
    ("cpu", 4): Configuration(16, 16, 16, 1, 1),
    ("cpu", 8): Configuration(16, 16, 16, 1, 1),
}
# Every tile's entries divide it, so that no tile crosses from one part of the vocabulary into the next.
_PART = 256
_PARTS = 8


def configuration(architecture: str, width: int, features: int, vocabulary: int) -> Configuration:
    """The table's entry, with tiles no larger than the model."""
    family = architecture if (architecture, width) in TABLE else "gfx" if architecture.startswith("gfx") else "sm_90"
    if architecture.startswith("sm_") and int(architecture[3:]) < 90:
        family = "sm_80"
    elif architecture.startswith("sm_12"):
        family = "sm_80"  # consumer Blackwell has Ampere's shared memory and instructions
    found = TABLE[family, width]
    return found._replace(
        entries=min(found.entries, max(16, triton.next_power_of_2(vocabulary))),
        features=min(found.features, max(16, triton.next_power_of_2(features))),
    )


def part_of(vocabulary: int) -> int:
    """Entries of a part of the vocabulary, whose states are merged in order: a function of the vocabulary alone."""
    return _PART * max(1, triton.cdiv(vocabulary, _PART * _PARTS))


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, …; cpu for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
