"""Checkpoints of a run: whole or absent, the newest one found by its name."""

import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_bridge.atomic import replacing

_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write ``folder/step-N/state.pt`` (tensors, numbers, the global random states) and drop all but the newest.

    What a killed process left half-written in ``folder`` goes too.
    """
    path = folder / f"step-{step:08d}"
    with replacing(path) as temporary:
        temporary.mkdir()
        torch.save({"step": step, "random": _random_states(), **state}, temporary / "state.pt")
    for old in [*sorted(_checkpoints(folder))[:-keep], *folder.glob(".step-*.tmp")]:
        shutil.rmtree(old)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return max(_checkpoints(folder), default=None)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint and set the global random states to what they were."""
    try:
        state = torch.load(path / "state.pt", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path / 'state.pt'} cannot be read: {error}") from error
    states = state["random"]
    torch.set_rng_state(states["torch"])
    random.setstate((states["python"][0], tuple(states["python"][1]), states["python"][2]))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    return state


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _random_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        # weights_only loading takes tensors, not arrays.
        "numpy": [str(kind), torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
