"""The tile that the kernels share, and rows that lie where they can be copied from."""

from torch import Tensor

# None was timed. In shared memory a stage of the ring has 48 KiB.
ROWS, ENTRIES, FEATURES = 128, 256, 64
# Bytes that are copied at a time, and that they begin at multiples of.
ALIGNMENT = 16


def fits(x: Tensor, unit: int) -> bool:
    """Whether rows can be read where they are: without gaps, each beginning a multiple of ``unit`` elements on."""
    return x.stride(1) == 1 and x.stride(0) % unit == 0 == x.data_ptr() % ALIGNMENT


def padded(features: int, unit: int) -> int:
    """Elements of a row that ends where the next may begin."""
    return -(-features // unit) * unit


def readable(x: Tensor, unit: int) -> Tensor:
    """These rows, or a copy that fits."""
    return x if fits(x, unit) else x.new_empty(len(x), padded(x.shape[1], unit))[:, : x.shape[1]].copy_(x)
