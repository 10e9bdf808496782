"""Maps over the stream of weights, applied at the source: another dtype, other names, quantisation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

# (name, whole tensor) -> the (name, tensor) pairs that are sent for them. Also called with meta tensors, so that names,
# shapes and dtypes are known before anything is overwritten.
Through = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Cast:
    """Send floating-point weights as ``dtype``: float32 master weights to a bfloat16 rollout.

    >>> list(Cast(torch.bfloat16)("w", torch.ones(2)))
    [('w', tensor([1., 1.], dtype=torch.bfloat16))]
    """

    dtype: torch.dtype

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The pair in the other dtype; integers stay."""
        yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def needs_whole_tensors(through: Through | None) -> bool:
    """Whether the map must see whole tensors. A cast works on shards, so that fewer bytes are gathered."""
    return through is not None and not isinstance(through, Cast)
