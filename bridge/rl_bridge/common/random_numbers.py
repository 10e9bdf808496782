"""The global generators that a class of the user's draws its first weights from: torch's, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class Generators(NamedTuple):
    """The state of each generator; another process can set them."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any


def generators() -> Generators:
    """The states of this process, as they are now."""
    return Generators(torch.get_rng_state(), random.getstate(), np.random.get_state())


@contextmanager
def drawing_from(start: Generators | int) -> Iterator[None]:
    """Inside, the generators begin at these states or at a seed; behind, each is where it was before."""
    before = generators()
    try:
        if isinstance(start, int):
            torch.default_generator.manual_seed(start)
            random.seed(start)
            np.random.seed(start % 2**32)
        else:
            _set(start)
        yield
    finally:
        _set(before)


def _set(states: Generators) -> None:
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)
