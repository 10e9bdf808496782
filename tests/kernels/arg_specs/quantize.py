"""Of the quantiser, for each kind of scale, code and alignment."""

import torch

from rl_kernels.quantize.table import WIDTHS, Group, tile_height
from rl_kernels.quantize.triton import LARGEST_BLOCK, tile_of, warps_of
from rl_kernels.quantize.triton_kernels import absmax_kernel, quantize_kernel


def _specification(function, dtype, out, granularity, width, targets=None, *, whole=True, aligned=True):
    height = (tile_height(width, aligned) if whole else 1) // (2 if granularity == "tensor" else 1)
    group = Group(torch.bfloat16, torch.int8, height, width, whole, aligned)
    rows, columns = tile_of(group, granularity)
    constants = {"GRANULARITY": granularity, "WHOLE": whole, "FP8": out != "i8", "NATIVE": out == "native fp8"}
    constants |= {"UNSIGNED_ZERO": out == "fnuz", "ALIGNED": aligned, "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK": 128}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    special = {"table": "*i64", "weight_like": f"*{dtype}", "code_like": "*i8" if out == "i8" else "*u8"}
    special |= {"absmax": "*i32", "largest": "fp32"}
    types = {name: special.get(name, "i32") for name in function.arg_names if name not in constants}
    options = {"aligned": ("table", "weight_like", "code_like", "absmax") if aligned else ("table",)}
    options = {"aligned": tuple(n for n in options["aligned"] if n in types), "warps": warps_of(group)}
    return function, types, constants, options | ({"targets": targets} if targets else {})


_NATIVE = ("sm_90", "sm_100")
SPECIFICATIONS = {
    "absmax bf16": _specification(absmax_kernel, "bf16", "i8", "tensor", WIDTHS[0]),
    "int8 channel bf16": _specification(quantize_kernel, "bf16", "i8", "channel", WIDTHS[1]),
    "int8 channel bf16, wide": _specification(quantize_kernel, "bf16", "i8", "channel", WIDTHS[2]),
    "int8 channel bf16, wider": _specification(quantize_kernel, "bf16", "i8", "channel", WIDTHS[1], whole=False),
    "int8 channel fp32, unaligned": _specification(quantize_kernel, "fp32", "i8", "channel", WIDTHS[1], aligned=False),
    "int8 channel fp32, wider, unaligned": _specification(
        quantize_kernel, "fp32", "i8", "channel", WIDTHS[1], whole=False, aligned=False
    ),
    "int8 tensor fp32, unaligned": _specification(quantize_kernel, "fp32", "i8", "tensor", WIDTHS[0], aligned=False),
    "fp8 block fp32, unaligned": _specification(
        quantize_kernel, "fp32", "fp8", "block", LARGEST_BLOCK, whole=False, aligned=False
    ),
    "int8 channel fp32": _specification(quantize_kernel, "fp32", "i8", "channel", WIDTHS[1]),
    "int8 tensor bf16": _specification(quantize_kernel, "bf16", "i8", "tensor", WIDTHS[0]),
    "fp8 channel bf16": _specification(quantize_kernel, "bf16", "fp8", "channel", WIDTHS[1]),
    "fp8 block bf16": _specification(quantize_kernel, "bf16", "fp8", "block", LARGEST_BLOCK),
    "fp8 block bf16, fnuz": _specification(
        quantize_kernel, "bf16", "fnuz", "block", LARGEST_BLOCK, ("gfx90a", "gfx942")
    ),
    "fp8 channel bf16, native": _specification(quantize_kernel, "bf16", "native fp8", "channel", WIDTHS[1], _NATIVE),
    "fp8 block bf16, native": _specification(quantize_kernel, "bf16", "native fp8", "block", LARGEST_BLOCK, _NATIVE),
}
