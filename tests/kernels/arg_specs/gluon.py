"""Of the Gluon kernels: one architecture each."""

from rl_kernels.experimental.gluon import tma
from rl_kernels.experimental.gluon.linear_logprobs import KERNELS, own_constants
from rl_kernels.experimental.gluon.rows import BLOCK_K, BLOCK_M, BLOCK_N
from rl_kernels.experimental.on_chip_forward import GROUP


def _specification(name: str, dtype: str, everything: bool):
    """The plain kernel, or the one with every option."""
    on = KERNELS[name]
    types = dict.fromkeys(("inv_temperature", "states", "targets"), "*fp32") | {"tokens": "*i64", "softcap": "fp32"}
    types |= {"bias": f"*{dtype}", "allowed": "*i32"} if everything else {"bias": "*fp32", "allowed": "*fp32"}
    constants = dict.fromkeys(("BIASED", "CAPPED", "ALLOWED"), everything) | {"GROUP": GROUP, "STAGES": on.stages}
    # A hidden size that is no multiple of a tile's, with every option.
    constants |= own_constants(name, BLOCK_K + everything)
    if on.gathers:
        types |= {"hidden": f"*{dtype}", "weight": f"*{dtype}", "rows": "*i64"}
    else:
        types |= {n: f"tensordesc<{dtype}[{r},{BLOCK_K}],{tma.LAYOUT!r}>" for n, r in _DESCRIBED}
    types = {n: types.get(n, "i32") for n in on.kernel.arg_names if n not in constants}
    aligned = ("part_size", "hidden_row_stride", "weight_row_stride", *(("hidden_size",) if on.gathers else ()))
    aligned = tuple(n for n, kind in types.items() if kind.startswith("*") or n in aligned)
    how = {"matrix": True, "bulk": True, "warps": on.warps, "aligned": aligned, "targets": (name,)}
    return on.kernel, types, constants, how


_DESCRIBED = (("hidden", BLOCK_M), ("weight", BLOCK_N))
SPECIFICATIONS = {
    f"forward {dtype}{', every option' if everything else ''} ({name})": _specification(name, dtype, everything)
    for name in KERNELS
    for dtype, everything in (("bf16", False), ("bf16", True), ("fp16", False))
}
