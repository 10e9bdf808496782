"""The tile that the kernels share, and whether rows lie where the hardware can copy them from."""

from torch import Tensor

# Not timed on a GPU. A stage of the ring has 48 KiB of shared memory.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
# Bytes copied at a time; addresses are multiples of it.
ALIGNMENT = 16


def fits(x: Tensor, unit: int) -> bool:
    """Whether rows can be read where they are: without gaps, each beginning a multiple of ``unit`` elements on."""
    return x.stride(1) == 1 and x.stride(0) % unit == 0 == x.data_ptr() % ALIGNMENT


def padded(hidden_size: int, unit: int) -> int:
    """Elements of a row that ends where the next may begin."""
    return -(-hidden_size // unit) * unit


def readable(x: Tensor, unit: int) -> Tensor:
    """These rows, or where they do not fit a copy that does."""
    return x if fits(x, unit) else x.new_empty(len(x), padded(x.shape[1], unit))[:, : x.shape[1]].copy_(x)
