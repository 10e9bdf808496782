"""Of the quantiser of activations, and of the int8 matrix product."""

from rl_kernels.int8_matmul.triton import FEW, MANY, WIDEST, Tiles, tiles_for
from rl_kernels.int8_matmul.triton_kernels import matmul_kernel, tokens_kernel

_POINTERS = {"codes": "*i8", "weight": "*i8", "scales": "*fp32", "weight_scale": "*fp32", "bias": "*fp32"}


def _specification(function, dtype, constants, options):
    special = _POINTERS | {"x": f"*{dtype}", "y": f"*{dtype}", "half_range": "fp32"}
    constants = constants | {n: 1 for n in ("column_stride", "weight_column_stride") if n in function.arg_names}
    types = {name: special.get(name, "i32") for name in function.arg_names if name not in constants}
    multiples = ("in_features", "row_stride", "weight_row_stride", "out_features")
    aligned = tuple(n for n in types if n in multiples or (n in special and n != "half_range"))
    return function, types, constants, options | {"aligned": aligned}


def _matmul(tiles: Tiles, *, biased: bool = False):
    sizes = {
        "BIASED": biased,
        "GROUP": 8,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }
    return _specification(matmul_kernel, "bf16", sizes, {"warps": tiles.warps, "stages": tiles.stages, "matrix": True})


SPECIFICATIONS = {
    "tokens bf16": _specification(tokens_kernel, "bf16", {"WHOLE": True, "BLOCK_K": 4096}, {}),
    "tokens bf16, wide": _specification(tokens_kernel, "bf16", {"WHOLE": True, "BLOCK_K": WIDEST}, {}),
    "tokens fp32, wider": _specification(tokens_kernel, "fp32", {"WHOLE": False, "BLOCK_K": WIDEST}, {}),
    "product of many tokens": _matmul(MANY),
    "product of many tokens, bias": _matmul(MANY, biased=True),
    "product of 16 tokens": _matmul(FEW),
    "product of 64 tokens, bias": _matmul(tiles_for(64), biased=True),
}
