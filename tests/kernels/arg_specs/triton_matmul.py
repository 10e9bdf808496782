"""Of the forward whose matrix product is Triton's own: its tiles differ from architecture to architecture."""

from rl_kernels.experimental.on_chip_forward import GROUP
from rl_kernels.experimental.triton_matmul.configurations import configuration
from rl_kernels.experimental.triton_matmul.triton_kernels import forward_kernel


def _specification(dtype, target, *, everything, mixed=False, ragged=False):
    """The plain kernel, or the one with every option."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    pointers = dict.fromkeys(("inv_temperature", "states", "targets"), f"*{wide}")
    pointers |= {"hidden": "*bf16" if mixed else f"*{dtype}", "weight": f"*{dtype}", "rows": "*i64", "tokens": "*i64"}
    pointers |= {"bias": f"*{dtype}", "allowed": "*i32"} if everything else {"bias": "*fp32", "allowed": "*fp32"}
    tile = configuration(target, {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[dtype], 4097 if ragged else 4096, 128256)
    constants = {"BIASED": everything, "CAPPED": everything, "ALLOWED": everything}
    constants |= {"WIDENED": mixed, "EVEN": not ragged, "GROUP": GROUP, "BLOCK_M": tile.block_m}
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "hidden_stride": 1, "weight_stride": 1}
    names = [n for n in forward_kernel.arg_names if n not in constants]
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in names}
    strides = ("hidden_row_stride", "weight_row_stride", "hidden_size", "part_size")
    aligned = tuple(n for n in types if n in pointers or (n in strides and not ragged))
    how = {"matrix": dtype not in ("fp32", "fp64"), "warps": tile.warps, "stages": tile.stages}
    return forward_kernel, types, constants, how | {"aligned": aligned, "targets": (target,)}


_PLAIN, _EVERY = {"everything": False}, {"everything": True}
_VARIANTS = (
    ("forward bf16", "bf16", _PLAIN),
    ("forward bf16, every option", "bf16", _EVERY),
    ("forward bf16, every option, ragged hidden size", "bf16", _EVERY | {"ragged": True}),
    ("forward fp32", "fp32", _PLAIN),
    ("forward fp32, every option", "fp32", _EVERY),
    ("forward bf16 by fp32, every option", "fp32", _EVERY | {"mixed": True, "ragged": True}),
    ("forward fp64, every option", "fp64", _EVERY | {"ragged": True}),
)

SPECIFICATIONS = {
    f"{name} ({target})": _specification(dtype, target, **options)
    for name, dtype, options in _VARIANTS
    for target in ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950")
}
