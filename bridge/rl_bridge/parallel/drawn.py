"""Weights that are drawn for a comparison: large ones, with which a difference shows that a model's own may hide.

Residual projections and heads that start at zero make every number alike, and small weights make attention a mean. What
an arrangement is worth is a matter of the class, and must not be read off the weights that it happens to have.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rl_bridge.weights.manifest import local

SCALES = (1.5, 0.5, 0.15)
"""Deviations of a matrix over the root of its fan-in, tried in this order: of a deep class the first may overflow."""
NUDGE = 2.0**-22
"""A relative change of weights that moves numbers about as much as another order of sums does."""


@torch.no_grad()
def draw(model: nn.Module, scale: float) -> None:
    """Give a new model's parameters random values; the program's random state and whole numbers stay as they are.

    >>> one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> draw(one, 1.0), draw(other, 1.0)
    (None, None)
    >>> torch.equal(one.weight, other.weight)
    True
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    generator = torch.Generator().manual_seed(0)
    for parameter in _floats(model):
        noise = _noise(parameter, generator)
        if id(parameter) in tables:
            parameter.copy_(noise)
        elif parameter.ndim < 2:
            parameter.add_(noise.mul_(0.25))  # norms, decays and gates stay near what the class makes of them
        else:
            parameter.copy_(noise.mul_(scale * max(parameter.shape[1:]) ** -0.5))


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Change every weight by about as much as rounding does."""
    generator = torch.Generator().manual_seed(1)
    for parameter in _floats(model):
        parameter.mul_(1 + NUDGE * _noise(parameter, generator))


def _floats(model: nn.Module) -> Iterator[nn.Parameter]:
    # Whole numbers, as the multipliers of a hash, are part of what the class computes.
    return (parameter for parameter in model.parameters() if parameter.is_floating_point())


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu").to(parameter.device)


def fingerprint(model: nn.Module) -> str:
    """A hash of this worker's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        sums = local(parameter).double()
        for value in (sums.sum(), sums.square().sum()):
            digest.update(repr(float(value)).encode())
    return digest.hexdigest()
