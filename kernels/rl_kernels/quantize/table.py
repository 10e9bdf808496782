"""The pointer table: a model's weights as matrices, a row of int64 each, so that one launch has them all."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.quantize.scheme import Scheme

# Widths of a row that fit into registers, each with a launch of its own.
WIDTHS = (1024, 4096, 16384)


class Group(NamedTuple):
    """What one launch can take: dtypes, what a program has (a block, or rows and columns of a tile), whether it holds
    all that shares a scale, and whether vectors can be read everywhere.
    """

    weight: torch.dtype
    out: torch.dtype
    height: int
    width: int
    whole: bool
    aligned: bool


class Matrix(NamedTuple):
    """A row of the table. Addresses in bytes, strides in elements, ``first`` the number of its first program,
    ``across`` how many programs stand side by side, ``shared`` the place of its largest magnitude where several
    programs find it.
    """

    weight: int
    out: int
    scales: int
    rows: int
    columns: int
    weight_row: int
    weight_column: int
    out_row: int
    out_column: int
    first: int
    across: int
    shared: int


def groups(
    weights: list[Tensor], out: list[Tensor], scales: list[Tensor], scheme: Scheme
) -> tuple[dict[Group, tuple[list[Matrix], int]], int]:
    """A launch's matrices and number of programs; and how many largest magnitudes programs share."""
    found: dict[Group, tuple[list[Matrix], int]] = {}
    shared = 0
    for weight, codes, scale in zip(weights, out, scales, strict=True):
        stacked = scheme.granularity == "tensor" and scheme.name == "int8"
        matrices = list(_matrices(weight, codes, scale, scheme))
        for i, matrix in enumerate(matrices):
            group = _group(matrix, weight, codes, scheme)
            entries, programs = found.get(group, ([], 0))
            across = -(-matrix.columns // group.width) if scheme.granularity != "channel" else 1
            place = shared if stacked else shared + i
            entries.append(matrix._replace(first=programs, across=across, shared=place))
            found[group] = entries, programs + across * -(-matrix.rows // group.height)
        shared += 1 if stacked else len(matrices)
    return found, shared


def _matrices(weight: Tensor, codes: Tensor, scale: Tensor, scheme: Scheme) -> Iterator[Matrix]:
    if weight.dim() == 1:
        weight, codes, scale = weight[None], codes[None], scale[None]
    by_row = scheme.granularity == "channel" or scheme.name == "int8"
    if by_row and weight.dim() > 2 and _folds(weight) and _folds(codes):
        weight, codes, scale = weight.flatten(0, -2), codes.flatten(0, -2), scale.flatten(0, -2)
    one_scale = scale.numel() == 1
    for index in product(*(range(size) for size in weight.shape[:-2])):
        offsets = [
            sum(i * stride for i, stride in zip(index, tensor.stride(), strict=False)) * tensor.element_size()
            for tensor in (weight, codes, scale)
        ]
        yield Matrix(
            weight.data_ptr() + offsets[0],
            codes.data_ptr() + offsets[1],
            scale.data_ptr() + (0 if one_scale else offsets[2]),
            weight.shape[-2],
            weight.shape[-1],
            weight.stride(-2),
            weight.stride(-1),
            codes.stride(-2),
            codes.stride(-1),
            first=0,
            across=1,
            shared=0,
        )


def _folds(tensor: Tensor) -> bool:
    """Whether the axes before the last are one axis of one stride."""
    shape, strides = tensor.shape, tensor.stride()
    return all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(tensor.dim() - 2))


def _group(matrix: Matrix, weight: Tensor, codes: Tensor, scheme: Scheme) -> Group:
    aligned = (
        matrix.weight_column == matrix.out_column == 1
        and all(n % 16 == 0 for n in (matrix.columns, matrix.weight_row, matrix.out_row))
        and matrix.weight % 16 == matrix.out % 16 == 0
    )
    dtypes = weight.dtype, codes.dtype
    if scheme.granularity == "block":
        aligned = aligned and scheme.block % 16 == 0
        return Group(*dtypes, scheme.block, scheme.block, aligned, aligned)
    if scheme.granularity == "tensor":
        return Group(*dtypes, tile_height(WIDTHS[0], aligned) // 2, WIDTHS[0], True, aligned)
    # The whole row, or pieces of it twice.
    fitting = [width for width in WIDTHS[: 3 if aligned else 2] if matrix.columns <= width]
    if fitting:
        return Group(*dtypes, tile_height(fitting[0], aligned), fitting[0], True, aligned)
    return Group(*dtypes, 1, WIDTHS[1], False, aligned)


def tile_height(width: int, aligned: bool) -> int:
    """Rows at a time: what is not aligned has an address an element in registers, too."""
    return max(1, WIDTHS[2 if aligned else 1] // width)
