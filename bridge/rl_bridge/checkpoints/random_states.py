"""The global random states of a process, as JSON has them."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators; with a CUDA ``device`` that of its generator too."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    cuda = device if device is not None and device.type == "cuda" else None
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": None if cuda is None else _text(torch.cuda.get_rng_state(cuda)),
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to what ``random_states`` read. CUDA's is left alone on a machine without the device."""
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
